"""Upkeep of a region: lists, garbage collection, and which control plane owns the clouds."""

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from fleet.clouds.aws import calls
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.models import CloudRegion, Install, LaunchAttempt, LaunchUnit
from fleet.clouds.services.garbage import cloud_list
from fleet.clouds.services.upkeep import cloud_beat, launch_incidents
from fleet.faults.models import Incident
from fleet.machines.models import Machine
from kernel import clock
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import CloudFleet

pytestmark = pytest.mark.cloud

BUCKET = "switchyard-of-tests"


def look(fleet: CloudFleet, later_s: float = 300.0) -> None:
    fleet.world.clock.advance(later_s)
    cloud_list(CloudRegion.objects.get(), clock.now())


def forget(fleet: CloudFleet, *machines: str) -> None:
    """Deletes the rows of machines and of their launches."""
    rows = Machine.objects.filter(provider_id__in=machines)
    LaunchUnit.objects.filter(attempts__machines__in=rows).delete()
    rows.delete()


def test_a_machine_that_no_row_knows_is_ended_after_two_lists_but_not_on_the_first_day(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.order(2)
    cloud_fleet.order(1)
    cloud_fleet.provision()
    lost = cloud_fleet.live()[-1]
    forget(cloud_fleet, lost)
    for _ in range(4):
        look(cloud_fleet)
    assert lost in cloud_fleet.live(), "a dry run"
    Install.objects.update(dry_run_until=clock.now())
    look(cloud_fleet)

    assert lost not in cloud_fleet.live()
    assert len(cloud_fleet.live()) == 2


def test_after_two_lists_means_two_and_whole_ones(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.order(1)
    cloud_fleet.order(1)
    cloud_fleet.provision()
    Install.objects.update(dry_run_until=clock.now())
    cloud_fleet.world.clock.advance(700)
    lost = cloud_fleet.live()[0]
    forget(cloud_fleet, lost)
    look(cloud_fleet)
    cloud_fleet.world.silent_zones = {"us-east-1b"}
    look(cloud_fleet)
    assert lost in cloud_fleet.live()
    cloud_fleet.world.silent_zones = set()
    look(cloud_fleet)
    assert lost not in cloud_fleet.live()


def test_an_empty_database_ends_nobody_and_says_so(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.order(2)
    cloud_fleet.provision()
    Install.objects.update(dry_run_until=clock.now())
    forget(cloud_fleet, *cloud_fleet.live())
    assert not LaunchAttempt.objects.exists()
    for _ in range(4):
        look(cloud_fleet)

    assert len(cloud_fleet.live()) == 2
    assert Incident.objects.get().summary == "machine: 2 have no record, and no launch is recorded at all"


def test_a_machine_that_ended_unseen_and_was_forgotten_is_gone_by_two_lists(cloud_fleet: CloudFleet) -> None:
    [node] = cloud_fleet.order(1)
    cloud_fleet.provision()
    machine = cloud_fleet.world.machines.get(cloud_fleet.live()[0])
    assert machine is not None
    cloud_fleet.world.machines.end(machine, "Server.InternalError", "the host died")
    cloud_fleet.world.clock.advance(7200)
    look(cloud_fleet)
    assert cloud_fleet.machine(node).cloud_state == "pending"
    look(cloud_fleet)
    assert cloud_fleet.machine(node).cloud_state == "gone"


def test_a_quota_and_a_refusal_are_incidents_until_machines_come_again(cloud_fleet: CloudFleet) -> None:
    region = CloudRegion.objects.get()
    cloud_fleet.world.quotas = {"Running On-Demand Trn instances": 128}
    cloud_fleet.order(2)
    cloud_fleet.provision()
    launch_incidents(region, clock.now())
    incident = Incident.objects.get()
    said = "us-east-1 has no quota for more trn1.32xlarge: ask for more of 'Running On-Demand Trn instances' (VcpuLimit"
    assert (incident.kind, incident.summary[: len(said)]) == ("no-quota", said)
    cloud_fleet.world.quotas = {}
    cloud_fleet.world.faults.append(Fault("RunInstances", "UnauthorizedOperation"))
    cloud_fleet.provision_for(3700, step_s=925)
    launch_incidents(region, clock.now())
    assert [row.kind for row in Incident.objects.filter(state="open")] == ["launch-refused"]
    cloud_fleet.order(2)
    cloud_fleet.provision()
    launch_incidents(region, clock.now())
    assert not Incident.objects.filter(state="open").exists()


# --- ownership of the clouds ------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(cloud_fleet: CloudFleet) -> Any:
    """An S3 client of the region's bucket."""
    s3 = cloud_fleet.world.client("s3")
    s3.create_bucket(Bucket=BUCKET)
    row = CloudRegion.objects.get()
    row.base["bucket"] = BUCKET
    row.save()
    yield s3
    s3.delete_object(Bucket=BUCKET, Key="control/owner.json")
    s3.delete_bucket(Bucket=BUCKET)


def beat(fleet: CloudFleet) -> Install:
    fleet.world.clock.advance(60)
    cloud_beat(CloudRegion.objects.get(), clock.now())
    return Install.objects.get()


@pytest.mark.usefixtures("bucket")
def test_a_copied_database_changes_nothing_until_somebody_claims_the_clouds(cloud_fleet: CloudFleet) -> None:
    beat(cloud_fleet)
    copied = Install.objects.values().get()
    assert not beat(cloud_fleet).read_only
    Install.objects.update(**copied)  # from here on this install is the copy

    install = beat(cloud_fleet)
    assert install.read_only.startswith("another control plane wrote s3://switchyard-of-tests/control/owner.json")
    cloud_fleet.order(1)
    cloud_fleet.provision()
    assert not cloud_fleet.live()
    with pytest.raises(CommandError, match="this install is sw-"):
        call_command("aws_claim", confirm="sw-000000000000", stdout=StringIO())
    call_command("aws_claim", confirm=install.pk, stdout=StringIO())
    cloud_fleet.provision_for(180, step_s=60)
    assert not beat(cloud_fleet).read_only
    assert len(cloud_fleet.live()) == 1


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("was_carried_out", [True, False])
def test_a_beat_whose_answer_was_lost_is_our_own(
    cloud_fleet: CloudFleet, monkeypatch: pytest.MonkeyPatch, was_carried_out: bool
) -> None:
    first, send = beat(cloud_fleet).beat_etag, calls.send

    def loses(*call: Any) -> Any:
        if was_carried_out:
            send(*call)
        raise calls.Unanswered("", "the connection was closed")

    with monkeypatch.context() as broken:
        broken.setattr(calls, "send", loses)
        assert beat(cloud_fleet).beat_nonce
    install = beat(cloud_fleet)
    assert (install.read_only, install.beat_nonce) == ("", "")
    assert install.beat_etag != first


@pytest.mark.usefixtures("bucket")
def test_without_a_beat_for_a_quarter_of_an_hour_nothing_is_launched(cloud_fleet: CloudFleet) -> None:
    beat(cloud_fleet)
    cloud_fleet.world.clock.advance(timedelta(minutes=16).total_seconds())
    cloud_fleet.order(1)
    cloud_fleet.provision()
    assert not cloud_fleet.live()
    beat(cloud_fleet)
    cloud_fleet.provision()
    assert len(cloud_fleet.live()) == 1


def test_a_fleet_that_costs_money_is_stopped_by_its_name(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.order(2)
    cloud_fleet.provision()
    name, output = install_ensure(clock.now()).pk, StringIO()
    call_command("fleet_stop", stdout=output)
    assert (
        f"2 machines of aws, for 43.00 $/h, run on; `manage.py fleet_stop --cloud {name}` ends them"
        in output.getvalue()
    )
    with pytest.raises(CommandError, match="run on"):
        call_command("fleet_stop", cloud="sw-0", stdout=output)
    assert len(cloud_fleet.live()) == 2
    call_command("fleet_stop", cloud=name, stdout=output)
    assert not cloud_fleet.live()
