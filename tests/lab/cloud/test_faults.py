"""Faults, limits and the log of calls: what the cloud of tests does to a client on request."""

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError
from botocore.parsers import ResponseParserError

from lab.cloud.server import World
from lab.cloud.wire import NOT_IN_THIS_CLOUD
from lab.cloud.world import Ending, Fault, When
from tests.lab.cloud.conftest import Network, ids_of, refusal

pytestmark = pytest.mark.cloud


def test_a_fault_before_a_call_leaves_nothing(world: World, network: Network) -> None:
    world.faults.append(Fault("RunInstances", "InternalError", times=2))

    with pytest.raises(ClientError) as raised:
        network.launch()
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert refusal(network.ec2.run_instances, **network.request()) == "InternalError"
    assert network.states() == {}
    assert len(network.launch()) == 1


def test_an_answer_that_is_lost_is_found_again_by_its_token(world: World, network: Network) -> None:
    world.faults.append(Fault("RunInstances", "Unavailable", When.AFTER))
    request = network.request(2, ClientToken="one")

    assert refusal(network.ec2.run_instances, **request) == "Unavailable"
    there = network.states()
    assert len(there) == 2
    assert set(ids_of(network.ec2.run_instances(**request))) == set(there)


@pytest.mark.parametrize(
    ("ending", "when", "launched"),
    [(Ending.RESET, When.BEFORE, 0), (Ending.RESET, When.AFTER, 1), (Ending.CUT, When.AFTER, 1)],
)
def test_a_connection_that_ends(world: World, network: Network, ending: Ending, when: When, launched: int) -> None:
    world.faults.append(Fault("RunInstances", when=when, ending=ending))

    with pytest.raises((BotoCoreError, ResponseParserError)):
        network.launch()
    assert len(network.states()) == launched


def test_an_answer_that_comes_too_late(world: World, network: Network) -> None:
    world.faults.append(Fault("DescribeInstances", delay_s=1.0))
    impatient = world.client("ec2", read_timeout_s=0.2)

    with pytest.raises(ReadTimeoutError):
        impatient.describe_instances()


def test_a_fault_of_one_region_leaves_the_others(world: World, network: Network) -> None:
    world.faults.append(Fault("DescribeInstances", "InternalError", region="eu-west-1"))

    assert refusal(network.ec2.describe_instances) == ""
    assert refusal(world.client("ec2", "eu-west-1").describe_instances) == "InternalError"


def test_topology_may_be_asked_once_a_second(world: World, network: Network) -> None:
    world.limits.enforced = True

    got = [refusal(network.ec2.describe_instance_topology) for _ in range(2)]
    world.clock.advance(1)
    assert [*got, refusal(network.ec2.describe_instance_topology)] == ["", "RequestLimitExceeded", ""]


def test_machines_have_a_bucket_beside_that_of_launches(world: World, network: Network) -> None:
    world.limits.enforced = True
    many = network.request(MinCount=1, MaxCount=990)
    world.quotas["Running On-Demand Trn instances"] = 0

    got = [refusal(network.ec2.run_instances, **many) for _ in range(2)]
    got += [refusal(network.ec2.run_instances, **network.request()) for _ in range(5)]
    assert got == ["VcpuLimitExceeded", "RequestLimitExceeded", *["VcpuLimitExceeded"] * 4, "RequestLimitExceeded"]


def test_each_call_is_logged_with_its_key_and_its_end(world: World, network: Network) -> None:
    network.launch()
    refusal(network.ec2.describe_instances, MaxResults=1)
    world.client("sqs").list_queues()

    last = list(world.calls)[-3:]
    assert [(each.service, each.operation, each.outcome) for each in last] == [
        ("ec2", "RunInstances", ""),
        ("ec2", "DescribeInstances", "InvalidParameterValue"),
        ("sqs", "ListQueues", ""),
    ]
    assert {each.access_key for each in last} == {world.access_key}
    assert world.count("RunInstances") == 1


def test_two_worlds_share_nothing(world: World, network: Network) -> None:
    network.launch()

    assert World().backend("ec2", "us-east-1").reservations == {}


def test_a_call_that_nobody_knows_says_so(world: World, network: Network) -> None:
    assert refusal(network.ec2.get_spot_placement_scores, TargetCapacity=1) == NOT_IN_THIS_CLOUD
    assert len(world.bugs) == 1
    world.bugs.clear()
