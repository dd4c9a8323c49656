"""`manage.py aws_check` reports what the account allows, denies and lacks, and changes nothing."""

import re
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from fleet.clouds.aws.check import Verdict, region_check
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.services.regions import cloud_region_read
from fleet.regions.services import region_create
from kernel import clock
from lab.cloud.server import World
from lab.cloud.stack import deploy_base, deploy_region
from lab.cloud.world import Fault
from models_registry.instance_types.models import InstanceType

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

NAME = "us-east-2"
TRN = "Running On-Demand Trn instances"


@pytest.fixture
def aws(cloud_fleet: Any) -> World:
    """A ready region with two zones."""
    world: World = cloud_fleet.world
    CloudRegion.objects.all().delete()
    InstanceType.objects.exclude(name="trn1.32xlarge").delete()
    base = deploy_base(world, install_ensure(clock.now()).id)
    deploy_region(world, NAME, base, ZoneB="us-east-2c")
    columns = {"provider": "aws", "stack": f"switchyard-{NAME}"}
    region_create(name=NAME, columns=columns, actor="ops", now=clock.now())
    cloud_region_read(CloudRegion.objects.get(pk=NAME), clock.now())
    return world


def check(**options: Any) -> tuple[str, int]:
    output, code = StringIO(), 0
    try:
        call_command("aws_check", stdout=output, **options)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return output.getvalue(), code


def test_all_that_is_needed_is_there(aws: World) -> None:
    launched = len(list(aws.machines))

    text, code = check()

    assert code == 0, text
    assert f"this install is {install_ensure(clock.now()).id}" in text
    assert "allowed  ec2 DescribeInstanceTopology" in text
    made = re.search(
        r"allowed  image ami-0000000000000aaaa: /aws/service/neuron/\S+, for x86_64, made on 2\d{3}-", text
    )
    assert made, text
    assert "allowed  ec2 RunInstances of trn1.32xlarge from on_demand in us-east-2" in text
    assert "unknown  ec2 TerminateInstances: there is no machine yet to test it with" in text
    assert f"allowed  quota {TRN}: 100000 vCPUs; 128 are needed" in text
    assert len(list(aws.machines)) == launched


def test_dry_runs_of_many_pools_wait_for_our_own_share(aws: World) -> None:
    pool = CapacityPool.objects.filter(region_id=NAME).latest("position")
    many = [
        CapacityPool(
            region_id=NAME, instance_type=pool.instance_type, market=pool.market, zone=pool.zone, zone_id=pool.zone_id,
            subnet=pool.subnet, image=pool.image, position=10 + number, reservation=f"cr-{number}",
        )
        for number in range(9)
    ]  # fmt: skip
    CapacityPool.objects.bulk_create(many)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        aws.clock.advance(seconds)

    cloud = CloudRegion.objects.get(pk=NAME)
    found = list(region_check(cloud, install_ensure(clock.now()).id, clock.now(), wait))

    tried = [each.verdict for each in found if each.what.startswith("ec2 RunInstances")]
    assert len(tried) == CapacityPool.objects.filter(region_id=NAME).count() > 9
    assert set(tried) == {Verdict.ALLOWED}, found
    assert waited


def test_a_share_that_is_used_up_for_long_is_said_and_not_waited_for(
    aws: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = clock.now() + timedelta(minutes=5)
    monkeypatch.setattr(
        "fleet.clouds.aws.calls.budget_spend",
        lambda region, operation, machines: later if operation == "RunInstances" else None,
    )
    cloud = CloudRegion.objects.get(pk=NAME)
    found = list(region_check(cloud, install_ensure(clock.now()).id, clock.now(), aws.clock.advance))
    tried = [each for each in found if each.what.startswith("ec2 RunInstances")]
    assert {each.verdict for each in tried} == {Verdict.UNKNOWN}
    assert "the own call budget of RunInstances is used up" in tried[0].text


def test_what_is_denied_is_said_with_its_reason(aws: World) -> None:
    aws.denials["enc-1"] = '{"explicitDeny": true, "context": {"action": "ec2:RunInstances"}}'
    message = "You are not authorized. Encoded authorization failure message: enc-1"
    aws.faults.append(Fault("RunInstances", "UnauthorizedOperation", message=message, times=1))
    aws.faults.append(Fault("DescribeTargetHealth", "AccessDenied", message="not for this role"))

    text, code = check(region=NAME)

    assert code == 1
    assert "denied   ec2 RunInstances of trn1.32xlarge from on_demand in us-east-2" in text
    assert '"explicitDeny": true' in text
    assert "denied   elbv2 DescribeTargetHealth: AccessDenied: not for this role" in text
    assert "2 to mend" in text


def test_a_quota_that_is_too_small_and_a_stack_that_has_gone(aws: World) -> None:
    aws.quotas[TRN] = 64

    text, code = check()
    assert code == 1
    assert f"missing  quota {TRN}: 64 vCPUs; 128 are needed" in text
    CloudRegion.objects.update(stack="switchyard-gone")
    text, code = check()
    assert code == 1
    assert "missing  stack switchyard-gone: there is no stack switchyard-gone" in text


def test_what_the_stack_states_now_is_compared_with_what_is_in_use(aws: World) -> None:
    cloud = CloudRegion.objects.get(pk=NAME)
    cloud.base["node_group"] = "sg-0000"
    cloud.save()

    text, code = check()

    assert code == 1
    assert f"missing  stack switchyard-{NAME}: node_group: in use is 'sg-0000'" in text


def test_a_region_that_is_not_there(aws: World) -> None:
    with pytest.raises(CommandError, match="no region 'eu-north-1' of provider aws"):
        check(region="eu-north-1")
