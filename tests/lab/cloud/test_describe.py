"""What the cloud of tests shows of its machines: late, by pages, by the clock, and nothing of a zone that is silent."""

import pytest

from lab.cloud.server import World
from lab.cloud.world import moment
from tests.lab.cloud.conftest import BEGAN, Network, ids_of, refusal

pytestmark = pytest.mark.cloud


def test_a_machine_is_not_found_before_it_is_visible(world: World, network: Network) -> None:
    world.delays.visible_s = 10
    ids = network.launch(2)

    assert refusal(network.ec2.describe_instances, InstanceIds=ids) == "InvalidInstanceID.NotFound"
    assert refusal(network.ec2.terminate_instances, InstanceIds=ids) == "InvalidInstanceID.NotFound"
    assert network.states() == {}
    assert network.ec2.describe_instance_status(IncludeAllInstances=True)["InstanceStatuses"] == []
    world.clock.advance(10)
    assert set(network.states()) == set(ids)


def test_a_life_by_the_clock(world: World, network: Network) -> None:
    [machine] = network.launch(1, cards=8)
    seen: list[str] = []
    for seconds in (0, 29, 1):
        world.clock.advance(seconds)
        seen += network.states().values()
    network.ec2.terminate_instances(InstanceIds=[machine])
    for seconds in (0, 30, 3600):
        world.clock.advance(seconds)
        seen.append(network.states().get(machine, "forgotten"))

    assert seen == ["pending", "pending", "running", "shutting-down", "terminated", "forgotten"]
    assert network.ec2.describe_network_interfaces()["NetworkInterfaces"] == []
    assert network.ec2.describe_volumes()["Volumes"] == []


def test_what_is_to_be_kept_is_left_behind(world: World, network: Network) -> None:
    request = network.request()
    request["NetworkInterfaces"][0]["DeleteOnTermination"] = False
    network.ec2.terminate_instances(InstanceIds=ids_of(network.ec2.run_instances(**request)))
    world.clock.advance(30)

    assert [each["Status"] for each in network.ec2.describe_network_interfaces()["NetworkInterfaces"]] == ["available"]
    [instance] = network.ec2.describe_instances()["Reservations"][0]["Instances"]
    assert instance["State"]["Name"] == "terminated"
    assert "PrivateIpAddress" not in instance
    assert instance["LaunchTime"] == moment(BEGAN)


def test_filters_see_the_state_that_is_shown(world: World, network: Network) -> None:
    network.launch(1)
    pending = [{"Name": "instance-state-name", "Values": ["pending"]}]

    assert len(network.states(Filters=pending)) == 1
    world.clock.advance(30)
    assert network.states(Filters=pending) == {}


def test_pages_count_machines(network: Network) -> None:
    ids = [*network.launch(4), *network.launch(4)]
    pages = list(network.ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 5}))

    assert [len(ids_of(page)) for page in pages] == [5, 3]
    assert [each for page in pages for each in ids_of(page)] == ids
    statuses = network.ec2.get_paginator("describe_instance_status").paginate(
        IncludeAllInstances=True, PaginationConfig={"PageSize": 5}
    )
    assert [len(page["InstanceStatuses"]) for page in statuses] == [5, 3]


def test_pages_have_limits(network: Network) -> None:
    ids = network.launch(1)

    assert refusal(network.ec2.describe_instances, MaxResults=1001) == "InvalidParameterValue"
    assert refusal(network.ec2.describe_instances, MaxResults=4) == "InvalidParameterValue"
    assert refusal(network.ec2.describe_instances, MaxResults=5, InstanceIds=ids) == "InvalidParameterCombination"
    assert refusal(network.ec2.describe_instances, NextToken="nobody's") == "InvalidNextToken"


def test_a_silent_zone_fails_lists_and_its_own_machines_alone(world: World, network: Network) -> None:
    here, there = network.launch(1), network.launch(1, zone="us-east-1b")
    world.silent_zones = {"us-east-1b"}

    for call in (network.ec2.describe_instances, network.ec2.describe_instance_status):
        assert refusal(call) == refusal(call, InstanceIds=there) == "Unavailable"
        assert refusal(call, InstanceIds=here) == ""
    assert refusal(network.ec2.terminate_instances, InstanceIds=there) == "Unavailable"
    assert refusal(network.ec2.run_instances, **network.request(zone="us-east-1b")) == "Unavailable"
    assert world.client("ec2", "us-west-2").describe_instances()["Reservations"] == []
    world.silent_zones.clear()
    assert network.states() == {here[0]: "pending", there[0]: "pending"}


def test_terminate_ends_all_or_none(network: Network) -> None:
    ids = network.launch(2)

    unknown = "i-0123456789abcdef0"
    assert refusal(network.ec2.terminate_instances, InstanceIds=[*ids, unknown]) == "InvalidInstanceID.NotFound"
    assert refusal(network.ec2.terminate_instances, InstanceIds=ids, DryRun=True) == "DryRunOperation"
    assert set(network.states().values()) == {"pending"}
    for _ in range(2):
        answer = network.ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"]
        assert [each["CurrentState"]["Name"] for each in answer] == ["shutting-down"] * 2


def test_network_nodes_of_running_machines_of_types_that_have_some(world: World, network: Network) -> None:
    ids = network.launch(4)
    network.launch(1, InstanceType="inf2.xlarge")

    assert network.ec2.describe_instance_topology()["Instances"] == []
    world.clock.advance(30)
    found = network.ec2.describe_instance_topology()["Instances"]
    assert [each["InstanceId"] for each in found] == ids
    assert {len(each["NetworkNodes"]) for each in found} == {3}
    assert len({tuple(each["NetworkNodes"]) for each in found}) > 1


def test_topology_has_its_own_limits(network: Network) -> None:
    ids = [f"i-{number:017x}" for number in range(101)]
    describe = network.ec2.describe_instance_topology

    assert refusal(describe, InstanceIds=ids) == "InvalidParameterValue"
    assert refusal(describe, InstanceIds=ids[:1], MaxResults=1) == "InvalidParameterCombination"
    assert refusal(describe, InstanceIds=ids[:1]) == "InvalidInstanceID.NotFound"


def test_topology_by_group_by_zone_and_by_pages(world: World, network: Network) -> None:
    network.ec2.create_placement_group(GroupName="sw")
    grouped = network.launch(2, Placement={"GroupName": "sw"})
    elsewhere = network.launch(3, zone="us-east-1b")
    world.clock.advance(30)

    by_group = network.ec2.describe_instance_topology(GroupNames=["sw"])["Instances"]
    zone = [{"Name": "availability-zone", "Values": ["us-east-1b"]}]
    by_zone = network.ec2.describe_instance_topology(Filters=zone)["Instances"]
    pages = list(network.ec2.get_paginator("describe_instance_topology").paginate(PaginationConfig={"PageSize": 2}))
    assert [each["InstanceId"] for each in by_group] == grouped
    assert [each["InstanceId"] for each in by_zone] == elsewhere
    assert [len(page["Instances"]) for page in pages] == [2, 2, 1]
