"""Gaps and errors of moto, a test for each call that `lab/cloud` answers instead. If one fails, moto supports the call
and the handler can be deleted."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.cloud.server import World, serve
from lab.cloud.wire import NOT_IN_THIS_CLOUD
from lab.cloud.world import HANDLERS
from tests.lab.cloud.conftest import (
    IMAGE,
    Network,
    ids_of,
    make_network,
    make_target_group,
    make_zone,
    record,
    refusal,
    target_states,
    text,
)

pytestmark = pytest.mark.cloud


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[World, Network]]:
    world = World(handlers={})
    with serve(world):
        yield world, make_network(world)


def launches_the_least(world: World, network: Network) -> bool:
    request = network.request(cards=1, MinCount=1, MaxCount=2, ClientToken="same")
    first, second = (ids_of(network.ec2.run_instances(**request)) for _ in range(2))
    return len(first) == 1 and first != second


def pages_by_reservation(world: World, network: Network) -> bool:
    network.launch(6)
    return len(ids_of(network.ec2.describe_instances(MaxResults=5))) > 5


def is_terminated_at_once(world: World, network: Network) -> bool:
    ids = network.launch(1)
    network.ec2.terminate_instances(InstanceIds=ids)
    return network.states(InstanceIds=ids)[ids[0]] == "terminated"


def ignores_pages_of_statuses(world: World, network: Network) -> bool:
    network.launch(6)
    return len(network.ec2.describe_instance_status(MaxResults=5)["InstanceStatuses"]) > 5


def is_unknown(operation: str, **params: object) -> Callable[[World, Network], bool]:
    """Of EC2."""
    return lambda _, network: refusal(getattr(network.ec2, operation), **params) == NOT_IN_THIS_CLOUD


def takes_a_stale_writer(world: World, _: Network) -> bool:
    zone = make_zone(world)
    zone.change(text("CREATE", 1))
    zone.change(text("DELETE", 1), text("CREATE", 2))
    return refusal(zone.change_checked, changes=[text("DELETE", 1), text("CREATE", 3)]) == ""


def is_in_sync_at_once(world: World, _: Network) -> bool:
    zone = make_zone(world)
    change = zone.change(record("UPSERT", "us-east-1", 10))
    return str(zone.route53.get_change(Id=change)["ChangeInfo"]["Status"]) == "INSYNC"


def knows_everybody(world: World, _: Network) -> bool:
    stranger = world.client("sts", aws_access_key_id="AKIANOBODY", aws_secret_access_key="no secret")
    return str(stranger.get_caller_identity()["Arn"]).endswith("user/moto")


def registers_at_once(world: World, network: Network) -> bool:
    client, group = make_target_group(world, network)
    client.register_targets(TargetGroupArn=group, Targets=[{"Id": "10.0.0.9"}])
    return target_states(client, group) == {"10.0.0.9": "healthy"}


def forgets_what_drains(world: World, network: Network) -> bool:
    client, group = make_target_group(world, network)
    client.register_targets(TargetGroupArn=group, Targets=[{"Id": "10.0.0.9"}])
    client.deregister_targets(TargetGroupArn=group, Targets=[{"Id": "10.0.0.9"}])
    return target_states(client, group) == {}


def brings_back_what_has_ended(world: World, network: Network) -> bool:
    ids = network.launch(1)
    network.ec2.terminate_instances(InstanceIds=ids)
    network.ec2.reboot_instances(InstanceIds=ids)
    return network.states(InstanceIds=ids)[ids[0]] == "running"


def start_one(world: World) -> tuple[Any, str, dict[str, Any]]:
    """A client of ECS, the name of a cluster, and the task that was started in it. In another region: the tests of
    EC2 count their machines."""
    region = "us-west-2"
    ecs, name = world.client("ecs", region), f"c{world.count('CreateCluster')}"
    ecs.create_cluster(clusterName=name)
    launched = world.client("ec2", region).run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1)
    document = json.dumps({"instanceId": ids_of(launched)[0]})
    instance = ecs.register_container_instance(cluster=name, instanceIdentityDocument=document)
    container = {"name": "agent", "image": "agent", "memory": 64}
    ecs.register_task_definition(family=name, containerDefinitions=[container], networkMode="host")
    arn = instance["containerInstance"]["containerInstanceArn"]
    return ecs, name, ecs.start_task(cluster=name, taskDefinition=name, containerInstances=[arn])["tasks"][0]


def starts_at_once(world: World, _: Network) -> bool:
    return bool(start_one(world)[2]["lastStatus"] == "RUNNING")


def ends_what_is_looked_at(world: World, _: Network) -> bool:
    ecs, name, task = start_one(world)
    seen = [ecs.describe_tasks(cluster=name, tasks=[task["taskArn"]])["tasks"][0]["lastStatus"] for _ in range(4)]
    return "STOPPED" in seen


def stops_at_once(world: World, _: Network) -> bool:
    ecs, name, task = start_one(world)
    return bool(ecs.stop_task(cluster=name, task=task["taskArn"])["task"]["lastStatus"] == "STOPPED")


def lists_stopped_ones(world: World, _: Network) -> bool:
    ecs, name, task = start_one(world)
    ecs.stop_task(cluster=name, task=task["taskArn"])
    return bool(ecs.list_tasks(cluster=name)["taskArns"] == [task["taskArn"]])


def tags_what_has_stopped(world: World, _: Network) -> bool:
    ecs, name, task = start_one(world)
    ecs.stop_task(cluster=name, task=task["taskArn"])
    tags = [{"key": "cell", "value": "a"}]
    return refusal(ecs.tag_resource, resourceArn=task["taskArn"], tags=tags) == ""


STILL = {
    ("ec2", "RebootInstances"): brings_back_what_has_ended,
    ("ec2", "RunInstances"): launches_the_least,
    ("ec2", "DescribeInstances"): pages_by_reservation,
    ("ec2", "DescribeInstanceStatus"): ignores_pages_of_statuses,
    ("ec2", "TerminateInstances"): is_terminated_at_once,
    ("ec2", "DescribeInstanceTopology"): is_unknown("describe_instance_topology"),
    ("ec2", "DescribeCapacityReservations"): is_unknown("describe_capacity_reservations"),
    ("ec2", "DescribeCapacityReservationTopology"): is_unknown("describe_capacity_reservation_topology"),
    ("ecs", "StartTask"): starts_at_once,
    ("ecs", "DescribeTasks"): ends_what_is_looked_at,
    ("ecs", "StopTask"): stops_at_once,
    ("ecs", "ListTasks"): lists_stopped_ones,
    ("ecs", "TagResource"): tags_what_has_stopped,
    ("elbv2", "RegisterTargets"): registers_at_once,
    ("elbv2", "DeregisterTargets"): forgets_what_drains,
    ("elbv2", "DescribeTargetHealth"): forgets_what_drains,
    ("sts", "DecodeAuthorizationMessage"): lambda world, _: bool(
        refusal(world.client("sts").decode_authorization_message, EncodedMessage="m")
    ),
    ("pricing", "GetProducts"): lambda world, _: (
        refusal(world.client("pricing").get_products, ServiceCode="AmazonEC2") == NOT_IN_THIS_CLOUD
    ),
    ("service-quotas", "ListServiceQuotas"): lambda world, _: bool(
        refusal(world.client("service-quotas").list_service_quotas, ServiceCode="ec2")
    ),
    ("route53", "ChangeResourceRecordSets"): takes_a_stale_writer,
    ("route53", "GetChange"): is_in_sync_at_once,
    ("sts", "GetCallerIdentity"): knows_everybody,
    ("ec2", "CreatePlacementGroup"): is_unknown("create_placement_group", GroupName="sw"),
    ("ec2", "DescribePlacementGroups"): is_unknown("describe_placement_groups"),
    ("ec2", "DeletePlacementGroup"): is_unknown("delete_placement_group", GroupName="sw"),
}


@pytest.mark.parametrize("call", sorted(HANDLERS), ids=":".join)
def test_remove_the_handler_when_moto_has_learned_the_call(moto: tuple[World, Network], call: tuple[str, str]) -> None:
    assert STILL[call](*moto)
