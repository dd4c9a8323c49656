"""Constraints of the cloud tables, and their views for planners."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from django.db import IntegrityError, transaction

from fleet.capacity.planning.pools import Market
from fleet.clouds.models import CapacityPool, CloudRegion, Install, LaunchAttempt, LaunchUnit
from fleet.clouds.planning.upkeep import CloudBase, ZoneBase
from fleet.machines.models import Machine
from fleet.reconcile.planning.states import MachineRole, MachineState
from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType

pytestmark = pytest.mark.django_db

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.fixture
def region() -> Region:
    InstanceType.objects.create(name="trn1.32xlarge", accelerator="trainium")
    return Region.objects.create(name="us-east-1", provider="aws")


def _unit(region: Region) -> LaunchUnit:
    return LaunchUnit.objects.create(
        id="u-1", region=region, instance_type_id="trn1.32xlarge", role=MachineRole.NODE, created_at=NOW
    )


def _attempt(unit: LaunchUnit, number: int, **columns: Any) -> LaunchAttempt:
    return LaunchAttempt.objects.create(
        unit=unit,
        number=number,
        pool_seen={},
        base={},
        token=f"token-{number}",
        subjects=["n-1"],
        begun_at=NOW,
        called_at=NOW,
        **columns,
    )


def test_a_unit_has_one_open_attempt(region: Region) -> None:
    unit = _unit(region)
    _attempt(unit, 1, ended_at=NOW)
    _attempt(unit, 2)
    with pytest.raises(IntegrityError), transaction.atomic():
        _attempt(unit, 3)
    with pytest.raises(IntegrityError), transaction.atomic():
        _attempt(unit, 1, ended_at=NOW)


def test_a_machine_of_a_cloud_has_one_row(region: Region) -> None:
    attempt = _attempt(_unit(region), 1)
    columns = {"provider": "aws", "provider_id": "i-1", "region": region, "state": MachineState.TAKEN}
    columns |= {"launched_by": attempt, "created_at": NOW, "state_since": NOW}
    Machine.objects.create(id="m-1", **columns)
    with pytest.raises(IntegrityError), transaction.atomic():
        Machine.objects.create(id="m-2", **columns)


def test_there_is_one_install() -> None:
    Install.objects.create(id="sw-0123456789ab", created_at=NOW, dry_run_until=NOW)
    with pytest.raises(IntegrityError), transaction.atomic():
        Install.objects.create(id="sw-ba9876543210", created_at=NOW, dry_run_until=NOW)


def test_a_pool_is_seen_with_its_place(region: Region) -> None:
    pool = CapacityPool.objects.create(
        region=region,
        instance_type_id="trn1.32xlarge",
        position=1,
        market=Market.RESERVED,
        zone="us-east-1a",
        zone_id="use1-az4",
        subnet="subnet-1",
        image="ami-1",
        network_nodes=["nn-1", "nn-2"],
        reservation="cr-1",
    )
    seen = pool.view()
    assert seen.path == ("use1-az4", "nn-1", "nn-2")
    assert (seen.id, seen.market, seen.name) == (pool.pk, Market.RESERVED, "reserved in us-east-1a (cr-1)")


def test_a_regions_static_parts_are_read_as_they_were_stored(region: Region) -> None:
    base = CloudBase("1234", {"us-east-1a": ZoneBase("subnet-1", "use1-az4")}, "sg-1", "arn:1", "node")
    row = CloudRegion.objects.create(
        region=region, aws_region="us-east-1", stack="switchyard", base=msgspec.to_builtins(base)
    )
    row.refresh_from_db()
    assert row.stated_base() == base
