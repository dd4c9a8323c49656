"""Targets of load balancers in the cloud of tests: initial, healthy or not, draining, and gone after that."""

from typing import Any

import pytest

from lab.cloud.server import World
from tests.lab.cloud.conftest import Network, make_target_group, refusal, target_states

pytestmark = pytest.mark.cloud

ADDRESS = "10.0.0.9"


@pytest.fixture
def entry(world: World, network: Network) -> tuple[Any, str]:
    return make_target_group(world, network)


def test_a_target_is_registered_checked_and_drained(world: World, entry: tuple[Any, str]) -> None:
    client, arn = entry
    asked = {"TargetGroupArn": arn, "Targets": [{"Id": ADDRESS}]}
    client.modify_target_group_attributes(
        TargetGroupArn=arn, Attributes=[{"Key": "deregistration_delay.timeout_seconds", "Value": "600"}]
    )

    client.register_targets(**asked)
    seen = []
    for seconds in (0, 99, 1):
        world.clock.advance(seconds)
        seen.append(target_states(client, arn)[ADDRESS])
    assert seen == ["initial", "initial", "healthy"]
    world.failing_targets.add(ADDRESS)
    assert target_states(client, arn)[ADDRESS] == "unhealthy"
    client.deregister_targets(**asked)
    for seconds, states in ((0, {ADDRESS: "draining"}), (599, {ADDRESS: "draining"}), (1, {})):
        world.clock.advance(seconds)
        assert target_states(client, arn) == states
    assert target_states(client, arn, Targets=[{"Id": ADDRESS}]) == {ADDRESS: "unused"}
    client.deregister_targets(**asked)  # again is no error


def test_one_that_drains_can_come_back_and_again_is_nothing(world: World, entry: tuple[Any, str]) -> None:
    client, arn = entry
    asked = {"TargetGroupArn": arn, "Targets": [{"Id": ADDRESS}]}
    client.register_targets(**asked)
    world.clock.advance(100)
    client.register_targets(**asked)
    assert target_states(client, arn) == {ADDRESS: "healthy"}

    client.deregister_targets(**asked)
    client.register_targets(**asked)
    assert target_states(client, arn) == {ADDRESS: "initial"}


def test_what_is_refused(world: World, network: Network, entry: tuple[Any, str]) -> None:
    client, arn = entry
    public = {"TargetGroupArn": arn, "Targets": [{"Id": "8.8.8.8"}]}
    nobodys = {"TargetGroupArn": f"{arn}0", "Targets": [{"Id": ADDRESS}]}

    assert refusal(client.register_targets, **public) == "InvalidTarget"
    for call in (client.register_targets, client.deregister_targets, client.describe_target_health):
        assert refusal(call, **nobodys) == "TargetGroupNotFound"


def test_a_group_behind_no_load_balancer_is_not_in_use(world: World, network: Network) -> None:
    client = world.client("elbv2")
    arn = client.create_target_group(Name="alone", Protocol="TCP", Port=443, VpcId=network.vpc, TargetType="ip")[
        "TargetGroups"
    ][0]["TargetGroupArn"]
    client.register_targets(TargetGroupArn=arn, Targets=[{"Id": ADDRESS}])

    assert target_states(client, arn) == {ADDRESS: "unused"}
