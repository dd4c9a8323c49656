"""Units as tasks of ECS with PostgreSQL and the test cloud: started once and whole although answers are lost, given
back, and proven gone."""

from typing import TYPE_CHECKING, Any

import pytest

from fleet.clouds.base import provider_named
from fleet.clouds.models import CloudRegion, LaunchAttempt, LaunchUnit
from fleet.clouds.services.starts import start_incidents
from fleet.faults.models import Incident
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.nodes.selectors import machines_awaited
from fleet.reconcile.planning.snapshot import ProviderStatus
from kernel import clock
from lab.cloud.world import HANDLERS, Ending, Fault, When
from tests.fleet.clouds.ecs.cluster_fleet import CLUSTER, ClusterFleet

if TYPE_CHECKING:
    from lab.cloud.server import World
    from lab.cloud.wire import Call

pytestmark = pytest.mark.cloud


def status_of(node: str) -> ProviderStatus:
    return provider_named("ecs").describe([node])[node]


def test_a_unit_is_started_by_one_call_with_a_task_on_a_container_instance_each(cluster_fleet: ClusterFleet) -> None:
    nodes = cluster_fleet.order(2)
    cluster_fleet.provision()

    world = cluster_fleet.world
    assert (world.count("StartTask"), world.count("RegisterTaskDefinition"), cluster_fleet.waiting()) == (1, 1, 0)
    unit, tasks = LaunchUnit.objects.get(), cluster_fleet.tasks()
    assert {task.instance for task in tasks} < set(cluster_fleet.instances)
    assert len({task.instance for task in tasks}) == 2
    machines = [cluster_fleet.machine(node) for node in nodes]
    assert {machine.provider_id for machine in machines} == {task.arn.rpartition("/")[2] for task in tasks}
    addresses = {one.id: one.moto.private_ip for one in world.machines}
    assert {machine.address for machine in machines} < set(addresses.values())
    for task in tasks:
        tags = {tag["key"]: tag["value"] for tag in task.tags}
        assert (tags["switchyard:unit"], tags["switchyard:attempt"]) == (unit.pk, "1")
        assert task.overrides["containerOverrides"][0]["environment"] == [{"name": "SWITCHYARD_UNIT", "value": unit.pk}]
    assert all(len(node.topology) > 1 for node in Node.objects.all()), "placed by DescribeInstanceTopology"
    assert unit.ended_at is not None

    cluster_fleet.order(2)
    cluster_fleet.provision()
    assert len({task.instance for task in cluster_fleet.tasks()}) == 4
    assert world.count("RegisterTaskDefinition") == 1
    waiting, *_ = cluster_fleet.order(1)
    cluster_fleet.provision()
    assert "4 container instances of trn1.32xlarge (4 in use); 1 needed" in Node.objects.get(id=waiting).reason


@pytest.mark.parametrize(
    "fault",
    [
        Fault("StartTask", when=When.AFTER, ending=Ending.RESET),
        Fault("StartTask", when=When.AFTER, ending=Ending.CUT),
        Fault("StartTask", "ServerException", When.AFTER),
    ],
    ids=["reset", "cut", "500"],
)
def test_a_call_whose_answer_is_lost_is_not_repeated_and_its_tasks_are_found(
    cluster_fleet: ClusterFleet, fault: Fault
) -> None:
    cluster_fleet.world.faults.append(fault)
    cluster_fleet.world.delays.task_visible_s = 8
    nodes = cluster_fleet.order(2)
    cluster_fleet.provision()
    assert LaunchAttempt.objects.get().ended_at is None
    cluster_fleet.provision_for(30)

    assert cluster_fleet.outcomes() == ["launched"]
    assert cluster_fleet.world.count("StartTask") == 1
    assert {cluster_fleet.machine(node).provider_id for node in nodes} == {
        task.arn.rpartition("/")[2] for task in cluster_fleet.tasks()
    }


def test_a_call_that_started_nothing_is_followed_by_a_new_attempt_once_that_is_certain(
    cluster_fleet: ClusterFleet,
) -> None:
    cluster_fleet.world.faults.append(Fault("StartTask", when=When.BEFORE, ending=Ending.RESET))
    cluster_fleet.order(2)
    cluster_fleet.provision_for(50)
    assert cluster_fleet.world.count("StartTask") == 1
    cluster_fleet.provision_for(150)

    assert cluster_fleet.outcomes() == ["attempt_ended", "launched"]
    assert len(cluster_fleet.tasks()) == 2


def test_a_unit_of_which_one_task_is_refused_is_stopped_and_started_elsewhere(cluster_fleet: ClusterFleet) -> None:
    nodes = cluster_fleet.order(2)
    cluster_fleet.provision()
    chosen = next(
        index for index, arn in enumerate(cluster_fleet.instances) if arn == cluster_fleet.tasks()[0].instance
    )
    cluster_fleet.give_back(*nodes)
    cluster_fleet.provision_for(60)
    assert cluster_fleet.tasks() == []

    start_task = HANDLERS["ecs", "StartTask"]

    def disconnected_meanwhile(world: "World", call: "Call") -> dict[str, Any]:
        cluster_fleet.instance(chosen).agent_connected = False
        return start_task(world, call)

    cluster_fleet.world.handlers = {**HANDLERS, ("ecs", "StartTask"): disconnected_meanwhile}
    cluster_fleet.order(2)
    cluster_fleet.provision_for(240)

    assert cluster_fleet.outcomes() == ["launched", "no_capacity", "launched"]
    tasks = cluster_fleet.tasks()
    assert len(tasks) == 2
    assert cluster_fleet.instances[chosen] not in {task.instance for task in tasks}
    assert "AGENT" in LaunchAttempt.objects.get(outcome="no_capacity").text


def test_a_task_is_gone_when_ecs_says_that_it_stopped_and_not_before(cluster_fleet: ClusterFleet) -> None:
    node, other = cluster_fleet.order(2)
    cluster_fleet.provision()
    assert status_of(node) is ProviderStatus.RUNNING
    machine = Machine.objects.get(runs=node)
    index = next(
        at
        for at, arn in enumerate(cluster_fleet.instances)
        if any(task.instance == arn and task.arn.endswith(machine.provider_id) for task in cluster_fleet.tasks())
    )
    cluster_fleet.instance(index).agent_connected = False
    cluster_fleet.world.clock.advance(30)
    assert status_of(node) is ProviderStatus.RUNNING, "a disconnected ECS agent proves nothing"

    cluster_fleet.world.client("ec2").terminate_instances(InstanceIds=[cluster_fleet.machines[index]])
    cluster_fleet.world.clock.advance(30)
    assert (status_of(node), status_of(other)) == (ProviderStatus.GONE, ProviderStatus.RUNNING)
    assert provider_named("ecs").describe_all()[node] is ProviderStatus.GONE


def test_a_task_that_ecs_forgot_is_gone_after_two_answers_without_it(cluster_fleet: ClusterFleet) -> None:
    node, _ = cluster_fleet.order(2)
    cluster_fleet.provision()
    cluster_fleet.world.tasks.clear()
    cluster_fleet.world.clock.advance(30)
    assert status_of(node) is ProviderStatus.RUNNING, "it may not be listed yet"
    cluster_fleet.world.clock.advance(900)
    assert status_of(node) is ProviderStatus.RUNNING
    assert status_of(node) is ProviderStatus.GONE


def test_a_node_that_is_given_back_has_its_task_stopped_and_its_container_instance_is_free(
    cluster_fleet: ClusterFleet,
) -> None:
    nodes = cluster_fleet.order(4)
    cluster_fleet.provision()
    assert len(cluster_fleet.tasks()) == 4
    cluster_fleet.give_back(*nodes)
    cluster_fleet.provision_for(60)

    assert cluster_fleet.tasks() == []
    assert {status_of(node) for node in nodes} <= {ProviderStatus.GONE, ProviderStatus.UNKNOWN}
    assert set(Machine.objects.values_list("cloud_state", flat=True)) <= {"STOPPED", "STOPPING"}
    cluster_fleet.order(4)
    cluster_fleet.provision_for(60)
    assert len(cluster_fleet.tasks()) == 4


def test_tasks_of_a_launch_in_doubt_are_stopped_if_their_nodes_are_given_back(cluster_fleet: ClusterFleet) -> None:
    cluster_fleet.world.faults.append(Fault("StartTask", when=When.AFTER, ending=Ending.RESET))
    nodes = cluster_fleet.order(2)
    cluster_fleet.provision()
    assert len(cluster_fleet.tasks()) == 2
    cluster_fleet.give_back(*nodes)
    cluster_fleet.provision_for(150)

    assert cluster_fleet.tasks() == []
    assert not cluster_fleet.waiting()


def test_no_task_is_started_on_a_container_instance_that_drains(cluster_fleet: ClusterFleet) -> None:
    cluster_fleet.ecs.update_container_instances_state(
        cluster=CLUSTER, containerInstances=cluster_fleet.instances[:3], status="DRAINING"
    )
    node, *_ = cluster_fleet.order(2)
    cluster_fleet.provision()

    assert cluster_fleet.world.count("StartTask") == 0
    assert "(3 draining, 1 free); 2 needed" in Node.objects.get(id=node).reason


def fail_start(fleet: ClusterFleet, node: str, reason: str) -> str:
    """Ends the task of a node before its agent joined. Returns its container instance."""
    [task] = [one for one in fleet.tasks() if one.arn.endswith(fleet.machine(node).provider_id)]
    task.end(fleet.world.clock.now(), 0.0, "TaskFailedToStart", reason)
    fleet.world.clock.advance(25)
    provider_named("ecs").describe([node])
    return task.instance


def test_a_node_whose_task_did_not_start_is_lost_immediately_and_the_next_waits(cluster_fleet: ClusterFleet) -> None:
    reason = "CannotPullContainerError: registry/node-agent:1.0: not found"
    [node] = cluster_fleet.order(1)
    cluster_fleet.provision()
    fail_start(cluster_fleet, node, reason)
    lost = Node.objects.get(id=node)
    assert lost.state == "lost"
    assert lost.reason == f"its task ended before it joined: TaskFailedToStart: {reason}"
    machine = cluster_fleet.machine(node)
    assert (machine.cloud_state, machine.cloud_reason) == ("STOPPED", f"TaskFailedToStart: {reason}")
    start_incidents(CloudRegion.objects.get(), clock.now())
    incident = Incident.objects.get(kind="task-not-started")
    assert (incident.subject, reason in incident.summary) == ("us-east-1/trn1.32xlarge", True)

    calls = cluster_fleet.world.count("StartTask")
    [following] = cluster_fleet.order(1)
    cluster_fleet.provision()
    [why] = machines_awaited(["us-east-1"], ["trn1.32xlarge"])[1:]
    assert (why.nodes, why.reason) == (1, f"the last launch did not start: TaskFailedToStart: {reason}")
    assert cluster_fleet.world.count("StartTask") == calls
    cluster_fleet.provision_for(60)
    assert cluster_fleet.world.count("StartTask") == calls + 1
    Machine.objects.filter(runs=following).update(last_seen_at=clock.now())
    start_incidents(CloudRegion.objects.get(), clock.now())
    assert not Incident.objects.filter(kind="task-not-started", state="open").exists()


def test_a_container_instance_whose_disk_is_full_is_avoided(cluster_fleet: ClusterFleet) -> None:
    [node] = cluster_fleet.order(1)
    cluster_fleet.provision()
    full = fail_start(cluster_fleet, node, "CannotPullContainerError: no space left on device")
    cluster_fleet.order(1)
    cluster_fleet.provision()
    assert full not in {task.instance for task in cluster_fleet.tasks()}
    waiting, *_ = cluster_fleet.order(3)
    cluster_fleet.provision()
    assert "(1 avoided after a failed start, 2 free, 1 in use); 3 needed" in Node.objects.get(id=waiting).reason


def test_a_revision_that_somebody_deregistered_is_registered_again(cluster_fleet: ClusterFleet) -> None:
    start_task = HANDLERS["ecs", "StartTask"]
    seen: set[str] = set()

    def deregistered_meanwhile(world: "World", call: "Call") -> dict[str, Any]:
        name = call.params["taskDefinition"]
        if not seen:
            world.backend("ecs", call.region).deregister_task_definition(name)
        seen.add(name)
        return start_task(world, call)

    cluster_fleet.world.handlers = {**HANDLERS, ("ecs", "StartTask"): deregistered_meanwhile}
    nodes = cluster_fleet.order(2)
    cluster_fleet.provision_for(20)
    assert cluster_fleet.outcomes() == ["later", "launched"]
    assert len(seen) == 2
    assert set(Node.objects.filter(id__in=nodes).values_list("state", flat=True)) == {"joining"}


def test_a_revision_of_somebody_else_with_our_digest_is_not_used(cluster_fleet: ClusterFleet) -> None:
    cluster_fleet.order(1)
    cluster_fleet.provision()
    ours = LaunchAttempt.objects.get().base["definition"]
    found = cluster_fleet.ecs.describe_task_definition(taskDefinition=ours, include=["TAGS"])
    known = found["taskDefinition"]
    container = {**known["containerDefinitions"][0], "image": "elsewhere/agent:1"}
    cluster_fleet.ecs.register_task_definition(
        family=known["family"], containerDefinitions=[container], networkMode="host", tags=found["tags"],
        taskRoleArn=known["taskRoleArn"], executionRoleArn=known["executionRoleArn"], volumes=known["volumes"],
    )  # fmt: skip
    cluster_fleet.order(1)
    cluster_fleet.provision()
    last = LaunchAttempt.objects.order_by("pk").last()
    assert last is not None
    assert last.base["definition"].endswith(":3")
