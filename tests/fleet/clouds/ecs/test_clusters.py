"""Upkeep of an ECS cluster with PostgreSQL and the test cloud: task events through EventBridge and SQS, container
instances that drain, garbage, and revisions of task definitions."""

import json
from datetime import timedelta

import pytest

from fleet.cells.models import Cell
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import UnreadableNotice
from fleet.clouds.ecs.events import InstanceEvent, TaskEvent, parse
from fleet.clouds.models import CloudNotice, CloudRegion, LaunchAttempt, LaunchUnit
from fleet.clouds.services.clusters import cluster_definitions, cluster_instances, cluster_list, cluster_queue
from fleet.clouds.services.upkeep import CLUSTER_STEPS, CloudUpkeep
from fleet.faults.models import Incident
from fleet.machines.models import Machine, ProviderCall
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import NoticeKind
from kernel import clock
from lab.cloud.world import Fault
from tests.fleet import rows
from tests.fleet.clouds.ecs.cluster_fleet import CLUSTER, ClusterFleet

pytestmark = pytest.mark.cloud


@pytest.fixture
def region(cluster_fleet: ClusterFleet) -> CloudRegion:
    """With the queue of its task events, two nodes that run, and an install that is older than a day."""
    world = cluster_fleet.world
    sqs, events = world.client("sqs"), world.client("events")
    url = sqs.create_queue(QueueName="task-notices")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name="tasks", EventPattern=json.dumps({"source": ["aws.ecs"]}))
    events.put_targets(Rule="tasks", Targets=[{"Id": "notices", "Arn": arn}])
    row = CloudRegion.objects.get()
    row.base["queue_url"] = url
    row.save()
    install = install_ensure(clock.now())
    install.dry_run_until = clock.now() - timedelta(seconds=1)
    install.save()
    cluster_fleet.order(2)
    cluster_fleet.provision()
    return row


def states() -> set[str]:
    return set(Machine.objects.values_list("cloud_state", flat=True))


def test_events_of_tasks_are_witnesses_of_their_states(cluster_fleet: ClusterFleet, region: CloudRegion) -> None:
    assert states() == {"PENDING"}
    cluster_fleet.world.clock.advance(15)
    cluster_fleet.world.settle()
    cluster_queue(region, clock.now())
    assert states() == {"RUNNING"}

    task = cluster_fleet.tasks()[0]
    cluster_fleet.ecs.stop_task(cluster=CLUSTER, task=task.arn)
    cluster_fleet.world.clock.advance(15)
    cluster_fleet.world.settle()
    cluster_queue(region, clock.now())
    assert Machine.objects.get(provider_id=task.arn.rpartition("/")[2]).cloud_state == "STOPPED"


def test_a_container_instance_that_drains_is_announced_and_withdrawn(
    cluster_fleet: ClusterFleet, region: CloudRegion
) -> None:
    used = cluster_fleet.tasks()[0]
    machine = Machine.objects.get(provider_id=used.arn.rpartition("/")[2])

    def set_status(status: str) -> None:
        cluster_fleet.ecs.update_container_instances_state(
            cluster=CLUSTER, containerInstances=[used.instance], status=status
        )
        cluster_fleet.world.clock.advance(30)
        cluster_instances(region, clock.now())

    set_status("DRAINING")
    notice = CloudNotice.objects.get(settled_at=None)
    assert (notice.machine_id, notice.kind, notice.text) == (
        machine.pk,
        NoticeKind.RETIREMENT,
        "its container instance drains",
    )
    set_status("DRAINING")
    assert CloudNotice.objects.count() == 1
    set_status("ACTIVE")
    assert not CloudNotice.objects.filter(settled_at=None).exists()


def test_tasks_that_no_row_references_are_stopped_and_others_are_not(
    cluster_fleet: ClusterFleet, region: CloudRegion
) -> None:
    lost = Machine.objects.all()[0]
    lost_id = lost.provider_id
    lost.delete()
    free = next(arn for arn in cluster_fleet.instances if arn not in {task.instance for task in cluster_fleet.tasks()})
    definition = LaunchAttempt.objects.get().base["definition"]
    cluster_fleet.ecs.start_task(cluster=CLUSTER, taskDefinition=definition, containerInstances=[free])
    for _ in range(4):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())

    stopping = {task.arn.rpartition("/")[2] for task in cluster_fleet.world.tasks.values() if task.stops is not None}
    assert stopping == {lost_id}, "a task without the tag of this install is somebody else's"


def test_old_revisions_are_deregistered_once_nothing_uses_them(
    cluster_fleet: ClusterFleet, region: CloudRegion
) -> None:
    first = LaunchAttempt.objects.get().base["definition"]
    for image in ("b", "c"):
        region.base["cluster"]["image"] = f"registry/node-agent@sha256:{image * 64}"
        region.save()
        nodes = cluster_fleet.order(1)
        cluster_fleet.provision()
        cluster_fleet.give_back(*nodes)
        cluster_fleet.provision_for(60)
    cluster_list(region, clock.now())
    cluster_definitions(region, clock.now())

    arns = cluster_fleet.ecs.list_task_definitions(status="ACTIVE")["taskDefinitionArns"]
    left = {arn.rpartition("/")[2] for arn in arns}
    assert first in left
    assert len(left) <= 3


def test_every_step_of_a_cluster_runs(cluster_fleet: ClusterFleet, region: CloudRegion) -> None:
    for step in ("queue", "container instances", "list", "definitions"):
        CLUSTER_STEPS[step].run(region, clock.now())
    assert CloudUpkeep()._steps_of(region) is CLUSTER_STEPS


def task_event(task: str, cluster: str = CLUSTER, **detail: str) -> str:
    stated = {"taskArn": f"arn:aws:ecs:us-east-1:1:task/c/{task}", "clusterArn": f"arn:aws:ecs:::cluster/{cluster}"}
    event = {"id": "e-1", "detail-type": "ECS Task State Change", "time": "2027-01-01T00:00:00Z"}
    return json.dumps({**event, "detail": {**stated, **detail}})


def test_events_change_only_what_ecs_confirms(cluster_fleet: ClusterFleet, region: CloudRegion) -> None:
    """A replayed or forged end of a task that runs, one of another cluster, and one that ECS does not describe."""
    cluster_fleet.world.clock.advance(15)
    cluster_queue(region, clock.now())
    task = Machine.objects.order_by("pk")[0].provider_id
    sqs, url = cluster_fleet.world.client("sqs"), region.base["queue_url"]
    sqs.purge_queue(QueueUrl=url)
    forged = {"lastStatus": "STOPPED", "stopCode": "SpotInterruption", "desiredStatus": "STOPPED"}
    for each in (task_event(task, **forged), task_event(task, "other", **forged), task_event("0" * 32, **forged)):
        sqs.send_message(QueueUrl=url, MessageBody=each)
    cluster_queue(region, clock.now())
    assert states() == {"RUNNING"}
    assert not CloudNotice.objects.exists()

    cluster_fleet.ecs.stop_task(cluster=CLUSTER, task=task)
    cluster_fleet.world.clock.advance(15)
    cluster_fleet.world.settle()
    cluster_fleet.world.faults.append(Fault("DescribeTasks", "AccessDeniedException"))
    cluster_queue(region, clock.now())
    assert states() == {"RUNNING"}
    kept = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessagesNotVisible"])
    assert int(kept["Attributes"]["ApproximateNumberOfMessagesNotVisible"]) > 0, "they are received again"
    sqs.send_message(QueueUrl=url, MessageBody=task_event(task))
    cluster_queue(region, clock.now())
    assert states() == {"RUNNING", "STOPPED"}


def test_a_task_without_the_tags_of_its_install_is_not_gone(cluster_fleet: ClusterFleet, region: CloudRegion) -> None:
    for task in cluster_fleet.tasks():
        task.tags = []
    for _ in range(3):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())
    assert states() == {"RUNNING"}
    assert len(cluster_fleet.tasks()) == 2

    LaunchAttempt.objects.update(base={**LaunchAttempt.objects.get().base, "cluster": "replaced"})
    cluster_fleet.world.tasks.clear()
    for _ in range(3):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())
    assert states() == {"RUNNING"}, "the list of another cluster proves nothing"


def test_a_cluster_that_is_deleted_is_an_incident_and_no_proof(
    cluster_fleet: ClusterFleet, region: CloudRegion
) -> None:
    cluster = region.base["cluster"]
    region.base = {**region.base, "cluster": {**cluster, "name": "deleted"}}
    region.save()
    for _ in range(3):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())
    incident = Incident.objects.get(kind="cluster-unread", state="open")
    assert "ClusterNotFoundException" in incident.summary
    assert states() == {"PENDING"}
    [waiting] = cluster_fleet.order(1)
    cluster_fleet.provision()
    node = Node.objects.get(id=waiting)
    assert (node.state, "ClusterNotFoundException" in node.reason) == ("joining", True)
    region.base = {**region.base, "cluster": cluster}
    region.save()
    cluster_list(region, clock.now())
    assert not Incident.objects.filter(kind="cluster-unread", state="open").exists()


def test_an_event_names_the_task_or_the_container_instance() -> None:
    assert parse(task_event("0123", lastStatus="RUNNING")) == TaskEvent("0123", CLUSTER)
    drains = json.loads(task_event("0123", containerInstanceArn="arn-1", status="DRAINING"))
    drains["detail-type"] = "ECS Container Instance State Change"
    assert parse(json.dumps(drains)) == InstanceEvent("arn-1", CLUSTER, "DRAINING")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        task_event("0123").replace("ECS Task State Change", "EC2 Instance State-change Notification"),
        task_event("0123").replace("ECS Task State Change", "ECS Container Instance State Change"),
        task_event("0123").replace("clusterArn", "other"),
        task_event("a task"),
        task_event("\0"),
    ],
)
def test_an_event_without_a_meaning_is_left_for_the_dead_letters(body: str) -> None:
    with pytest.raises(UnreadableNotice):
        parse(body)


CELL = "sim-70b-us-east-1-1"


def make_cell(*nodes: str) -> Cell:
    for node in nodes:
        NodeReport.objects.get_or_create(node_id=node)
    return rows.cell(CELL, *(Node.objects.get(id=node) for node in nodes))


def tags(fleet: ClusterFleet) -> dict[str, tuple[str, ...]]:
    """Node -> node, cell and generation in the tags of its task."""
    stated = {task.arn.rpartition("/")[2]: {one["key"]: one["value"] for one in task.tags} for task in fleet.tasks()}
    names = ("switchyard:node", "switchyard:cell", "switchyard:generation")
    return {row.runs: tuple(stated[row.provider_id].get(name, "-") for name in names) for row in Machine.objects.all()}


def test_tags_name_the_node_its_cell_and_the_generation(cluster_fleet: ClusterFleet, region: CloudRegion) -> None:
    first, second = sorted(row.runs for row in Machine.objects.all())
    assert set(tags(cluster_fleet).values()) == {("-", "-", "-")}
    cell = make_cell(first, second)
    cluster_list(region, clock.now())
    assert tags(cluster_fleet) == {first: (first, cell.pk, "1"), second: (second, cell.pk, "1")}

    calls = cluster_fleet.world.count("TagResource")
    cluster_list(region, clock.now())
    assert cluster_fleet.world.count("TagResource") == calls, "nothing has changed"
    cell.members.filter(node_id=second).delete()
    Cell.objects.update(generation=2)
    cluster_list(region, clock.now())
    assert tags(cluster_fleet) == {first: (first, cell.pk, "2"), second: (second, "", "")}


def test_a_task_that_serves_a_cell_is_not_stopped_although_its_row_is_lost(
    cluster_fleet: ClusterFleet, region: CloudRegion
) -> None:
    nodes = sorted(row.runs for row in Machine.objects.all())
    make_cell(*nodes)
    cluster_list(region, clock.now())
    Machine.objects.get(runs=nodes[0]).delete()
    for _ in range(4):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())
    assert len(cluster_fleet.tasks()) == 2

    Cell.objects.update(generation=2)
    for _ in range(4):
        cluster_fleet.world.clock.advance(400)
        cluster_list(region, clock.now())
    [stopped] = [task for task in cluster_fleet.world.tasks.values() if task.stops is not None]
    assert stopped.reason.endswith(f"it was {nodes[0]} in {CELL} at generation 1")


@pytest.mark.parametrize("has_joined", [False, True])
def test_tasks_that_a_restored_backup_does_not_know_are_adopted_until_they_have_joined(
    cluster_fleet: ClusterFleet, region: CloudRegion, has_joined: bool
) -> None:
    """The backup has the order, and neither its attempt nor its machines."""
    nodes = cluster_fleet.order(2)
    orders = list(ProviderCall.objects.filter(node_id__in=nodes).values())
    cluster_fleet.provision()
    if has_joined:
        cluster_list(region, clock.now())
    before = {task.arn for task in cluster_fleet.tasks()}
    Machine.objects.filter(runs__in=nodes).delete()
    LaunchUnit.objects.filter(attempts__subjects__contains=nodes[:1]).delete()
    for order in orders:
        ProviderCall.objects.create(**{**order, "claim": "", "claimed_until": None, "attempts": 0})
    Node.objects.filter(id__in=nodes).update(state="joining")
    cluster_fleet.provision_for(90)

    after = {task.arn for task in cluster_fleet.tasks()}
    assert len(after) == 4
    assert (after == before) is not has_joined
    machines = {row.provider_id for row in Machine.objects.all()}
    assert machines == {arn.rpartition("/")[2] for arn in after}
