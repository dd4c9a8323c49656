"""What the cloud of tests announces: warnings, changes of state, scheduled events, and a machine that is impaired."""

import json
from typing import Any

import pytest

from lab.cloud.ec2_describe import (
    BLOCK_WARNING,
    REBALANCE,
    SPOT_WARNING,
    STATE_CHANGE,
    recommend_rebalance,
    schedule,
    warn_of_interruption,
)
from lab.cloud.machines import Market, Reserved
from lab.cloud.server import World
from tests.lab.cloud.conftest import BEGAN, Network, refusal

pytestmark = pytest.mark.cloud


class Queue:
    """An SQS queue behind a rule for all that EC2 announces."""

    def __init__(self, world: World) -> None:
        self._sqs, events = world.client("sqs"), world.client("events")
        self._url = self._sqs.create_queue(QueueName="notices")["QueueUrl"]
        wanted = ["QueueArn"]
        arn = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=wanted)["Attributes"]["QueueArn"]
        events.put_rule(Name="ec2", EventPattern=json.dumps({"source": ["aws.ec2"]}))
        events.put_targets(Rule="ec2", Targets=[{"Id": "queue", "Arn": arn}])

    def read(self) -> list[dict[str, Any]]:
        got = self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10).get("Messages", [])
        for each in got:
            self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=each["ReceiptHandle"])
        return [json.loads(each["Body"]) for each in got]

    def kinds(self) -> list[tuple[str, str]]:
        """What came: kind, and the state or nothing."""
        return [(each["detail-type"], each["detail"].get("state", "")) for each in self.read()]


@pytest.fixture
def queue(world: World) -> Queue:
    return Queue(world)


def test_each_change_of_state_is_announced_once(world: World, network: Network, queue: Queue) -> None:
    [machine] = network.launch()
    [event] = queue.read()
    world.clock.advance(30)
    running = queue.kinds()
    network.ec2.terminate_instances(InstanceIds=[machine])
    world.clock.advance(30)

    assert (event["source"], event["detail"]) == ("aws.ec2", {"instance-id": machine, "state": "pending"})
    assert event["resources"][0].endswith(f"instance/{machine}")
    assert event["time"].startswith("2027-01-15T08:00:00")
    assert running == [(STATE_CHANGE, "running")]
    assert queue.kinds() == [(STATE_CHANGE, "shutting-down"), (STATE_CHANGE, "terminated")]
    assert queue.kinds() == []


def test_a_spot_machine_ends_two_minutes_after_its_warning(world: World, network: Network, queue: Queue) -> None:
    [machine] = network.launch(InstanceMarketOptions={"MarketType": "spot"})
    world.clock.advance(60)
    queue.read()

    recommend_rebalance(world, machine)
    warn_of_interruption(world, machine)
    assert [kind for kind, _ in queue.kinds()] == [REBALANCE, SPOT_WARNING]
    world.clock.advance(119)
    assert network.states() == {machine: "running"}
    world.clock.advance(1)
    assert network.states() == {machine: "shutting-down"}
    [instance] = network.ec2.describe_instances()["Reservations"][0]["Instances"]
    assert instance["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert instance["InstanceLifecycle"] == "spot"


def test_scheduled_events_and_a_failed_check(world: World, network: Network) -> None:
    sick, well = network.launch(2)
    world.clock.advance(30)
    schedule(world, sick, "instance-retirement", BEGAN + 86400)
    machine = world.machines.get(sick)
    assert machine
    machine.impaired_since = world.clock.now()

    by_id = {each["InstanceId"]: each for each in network.ec2.describe_instance_status()["InstanceStatuses"]}
    assert [each["Code"] for each in by_id[sick]["Events"]] == ["instance-retirement"]
    assert by_id[sick]["InstanceStatus"]["Status"] == "impaired"
    assert "Events" not in by_id[well]
    assert by_id[well]["InstanceStatus"]["Status"] == "ok"


def test_a_capacity_block_warns_ends_its_machines_and_then_ends(world: World, network: Network, queue: Queue) -> None:
    hour = 3600.0
    block = Reserved("trn1.32xlarge", "us-east-1a", 2, BEGAN - hour, BEGAN + 3 * hour, Market.BLOCK)
    world.machines.capacity.reserve(block)
    into: dict[str, Any] = {
        "InstanceMarketOptions": {"MarketType": "capacity-block"},
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": block.id}},
    }
    network.launch(1, **into)

    def state() -> tuple[str, int]:
        [found] = network.ec2.describe_capacity_reservations()["CapacityReservations"]
        return found["State"], found["AvailableInstanceCount"]

    assert state() == ("active", 1)
    assert refusal(network.ec2.run_instances, **network.request(2, **into)) == "ReservationCapacityExceeded"
    world.clock.advance(3 * hour - 2400)
    assert BLOCK_WARNING in [kind for kind, _ in queue.kinds()]
    assert set(network.states().values()) == {"running"}
    world.clock.advance(600)
    assert set(network.states().values()) == {"shutting-down"}
    assert refusal(network.ec2.run_instances, **network.request(**into)) != ""
    world.clock.advance(1800)
    assert state() == ("expired", 2)


def test_reservations_have_places_before_anything_runs_in_them(world: World, network: Network) -> None:
    nodes = ("nn-a", "nn-b", "nn-c")
    reserve = world.machines.capacity.reserve
    placed = reserve(Reserved("trn1.32xlarge", "us-east-1a", 2, BEGAN, network_nodes=nodes))
    reserve(Reserved("trn1.32xlarge", "us-east-1b", 2, BEGAN))
    world.client("ec2", "us-west-2")
    describe = network.ec2.describe_capacity_reservation_topology

    [found] = describe()["CapacityReservations"]
    assert (found["CapacityReservationId"], found["NetworkNodes"]) == (placed.id, list(nodes))
    assert refusal(describe, MaxResults=11) == "InvalidParameterValue"
    assert refusal(describe, CapacityReservationIds=["cr-0"]) == "InvalidCapacityReservationId.NotFound"
    assert world.client("ec2", "us-west-2").describe_capacity_reservations()["CapacityReservations"] == []
    target = {"CapacityReservationTarget": {"CapacityReservationId": placed.id}}
    network.launch(2, CapacityReservationSpecification=target)
    world.clock.advance(30)
    machines = network.ec2.describe_instance_topology()["Instances"]
    assert [each["NetworkNodes"] for each in machines] == [list(nodes)] * 2


def test_a_reservation_must_fit_and_an_open_one_is_used_first(world: World, network: Network) -> None:
    opened = world.machines.capacity.reserve(Reserved("trn1.32xlarge", "us-east-1a", 1, BEGAN, is_open=True))
    world.machines.capacity.free["trn1.32xlarge", "us-east-1a", Market.ON_DEMAND] = 1
    target: dict[str, Any] = {
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": opened.id}}
    }

    other_zone = network.request(zone="us-east-1b", **target)
    assert refusal(network.ec2.run_instances, **other_zone) == "InvalidParameterValue"
    network.launch()
    assert opened.left == 0
    network.launch()
    assert refusal(network.ec2.run_instances, **network.request()) == "InsufficientInstanceCapacity"
