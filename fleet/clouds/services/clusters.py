"""Upkeep of regions that are ECS clusters: the queue of task events, the list of tasks, container instances that drain,
and garbage. Events and lists write the same rows. A container instance that drains, or a task that ECS stops unasked,
is a notice of its machine, so that `fleet.faults.planning.notices` moves its cells before their tasks are stopped."""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.db.models import QuerySet

from fleet.clouds.aws.calls import CallFailed
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import Message, UnreadableNotice
from fleet.clouds.ecs.cluster import definitions_drop, instances_read, task_stop, task_tag, tasks_list
from fleet.clouds.ecs.definitions import STOP_TIMEOUT_S, family_of
from fleet.clouds.ecs.events import TaskEvent, parse
from fleet.clouds.ecs.provider import states_store, tasks_store
from fleet.clouds.ecs.units import PROVIDER, base_of, placed_of
from fleet.clouds.models import CloudNotice, CloudRegion, LaunchAttempt
from fleet.clouds.planning.task_tags import judge_stray, plan_tags, serves_of
from fleet.clouds.planning.tasks import OVER, TaskSeen
from fleet.clouds.planning.upkeep import Resource, ResourceKind
from fleet.clouds.selectors import nodes_serving
from fleet.clouds.services.garbage import GarbageSource, cloud_source, cloud_source_collect
from fleet.clouds.services.notices import notices_settle, queue_read
from fleet.machines.models import Machine
from fleet.machines.planner import ENDED, Statement
from fleet.machines.services.reports import notice_record
from fleet.reconcile.planning.states import MachineRole, MachineState, NoticeKind, NoticeSource
from kernel import clock, wake_ups

DRAINS = "its container instance drains"

log = logging.getLogger(__name__)


def cluster_queue(cloud: CloudRegion, now: datetime) -> None:
    """Reads the queue of task events."""
    queue_read(cloud, now, _handle_message)


def _handle_message(cloud: CloudRegion, message: Message, now: datetime) -> bool:
    """Whether to delete the message. It is deleted after the rows are written."""
    try:
        event = parse(message.body)
    except UnreadableNotice as error:
        log.warning("message %s of region %s is left for the dead letters: %s", message.id, cloud.pk, error)
        return False
    if not isinstance(event, TaskEvent):
        return True  # the next list reads container instances
    states_store({event.task: event.state}, now)
    machine = _tasks_of(cloud).filter(provider_id=event.task).first()
    if machine is not None and event.ends:
        notice_record(
            machine=machine,
            kind=NoticeKind.INTERRUPTION,
            source=NoticeSource.EVENTS,
            statement=Statement(event.event_id, event.at, event.at + timedelta(seconds=STOP_TIMEOUT_S)),
            text=event.why,
            now=now,
        )
    if machine is not None and event.state in ENDED:
        wake_ups.send("fleet.reconcile")
    return True


def _tasks_of(cloud: CloudRegion) -> "QuerySet[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)


def cluster_list(cloud: CloudRegion, now: datetime) -> None:
    """Lists the tasks of this install and stores their states, tags them, and stops those that no row references.
    Blocks as long as the cloud does."""
    stated = cloud.stated_base().cluster
    if stated is None:
        return
    try:
        tasks = tasks_list(cloud.aws_region, stated.name, install_ensure(now).id)
    except CallFailed as error:
        log.warning("region %s was not listed: %s", cloud.pk, error)
        return
    tasks_store(list(_tasks_of(cloud)), tasks, now)
    CloudRegion.objects.filter(pk=cloud.pk).update(listed_at=now)
    notices_settle(cloud, now)
    _tags_follow(cloud, tasks)
    cloud_source_collect(cloud, _task_garbage(cloud, stated.name, tasks), clock.now())


def _tags_follow(cloud: CloudRegion, tasks: Sequence[TaskSeen]) -> None:
    """Tags tasks with their nodes and cells. Tags that could not be set are set after the next list."""
    rows = _tasks_of(cloud).values_list("provider_id", "runs")
    serving = nodes_serving([node for _, node in rows])
    arns = {one.id: one.arn for one in tasks}
    for task, serves in plan_tags(tasks, {task: serving[node] for task, node in rows if node in serving}).items():
        try:
            task_tag(cloud.aws_region, arns[task], serves.tags)
        except CallFailed as error:
            log.warning("task %s of region %s was not tagged: %s", task, cloud.pk, error)
            return


def _task_garbage(cloud: CloudRegion, cluster: str, tasks: Sequence[TaskSeen]) -> GarbageSource:
    """A task is referenced if a row has its ID, while the attempt that started it is open, or if its tags name the
    current generation of a cell, which contradicts the rows."""
    running = [one for one in tasks if one.status not in OVER and one.desired not in OVER]
    known = set(_tasks_of(cloud).values_list("provider_id", flat=True))
    strays = {one.id: one for one in running if one.id not in known}
    serving = nodes_serving([serves_of(one).node for one in strays.values()]) if strays else {}
    tokens = frozenset(LaunchAttempt.objects.filter(ended_at=None).values_list("token", flat=True))
    units = LaunchAttempt.objects.filter(unit__in={one.unit for one in strays.values()})
    attempts = frozenset((unit, str(number)) for unit, number in units.values_list("unit_id", "number"))
    judged = {one.id: judge_stray(one, tokens, attempts, serving) for one in strays.values()}
    found = [
        Resource(
            ResourceKind.TASK,
            one.id,
            one.id in known or judged[one.id].is_referenced,
            is_recorded=one.id in known or judged[one.id].is_recorded,
            created_at=one.created_at,
        )
        for one in running
    ]
    for one in judged.values():
        if one.serves_now:
            log.error("task %s of region %s has no row, and serves %s", one.task.id, cloud.pk, serves_of(one.task))

    def stop(cloud: CloudRegion, garbage: Sequence[Resource]) -> Iterable[Resource]:
        for one in garbage:
            served = serves_of(strays[one.id])
            try:
                why = f"switchyard: no row references it{f'; it was {served}' if served.node else ''}"
                task_stop(cloud.aws_region, cluster, one.id, why)
            except CallFailed as error:
                log.warning("task %s of region %s is garbage and was not stopped: %s", one.id, cloud.pk, error)
                continue
            yield one

    return cloud_source(cloud, "tasks", found, stop, len(running))


def cluster_instances(cloud: CloudRegion, now: datetime) -> None:
    """Announces the tasks on container instances that drain, and withdraws it where they no longer do."""
    stated = cloud.stated_base().cluster
    if stated is None:
        return
    try:
        instances = instances_read(cloud.aws_region, stated.name)
    except CallFailed as error:
        log.warning("container instances of region %s were not read: %s", cloud.pk, error)
        return
    draining = {one.arn for one in instances if one.status == "DRAINING"}
    known = {one.arn for one in instances}
    announced = set(
        CloudNotice.objects.filter(
            settled_at=None, machine__region_id=cloud.pk, kind=NoticeKind.RETIREMENT
        ).values_list("machine_id", flat=True)
    )
    for machine in _tasks_of(cloud).exclude(cloud_state__in=ENDED).select_related("launched_by"):
        placed = placed_of(machine)
        if placed is None or placed.arn not in known:
            continue
        drains = placed.arn in draining
        if drains == (machine.pk in announced):
            continue
        notice_record(
            machine=machine,
            kind=NoticeKind.RETIREMENT,
            source=NoticeSource.STATUS,
            statement=Statement(placed.arn if drains else "", now, over=not drains),
            text=DRAINS if drains else "",
            now=now,
        )


def cluster_definitions(cloud: CloudRegion, now: datetime) -> None:
    """Deregisters revisions of task definitions that no task and no launch uses."""
    install = install_ensure(now).id
    attempts = LaunchAttempt.objects.filter(unit__region_id=cloud.pk).select_related("unit")
    in_use = set(_tasks_of(cloud).exclude(launched_by=None).values_list("launched_by_id", flat=True))
    kept = {base_of(one).definition for one in attempts if one.ended_at is None or one.pk in in_use}
    families = {family_of(one.unit.instance_type_id, MachineRole(one.unit.role), install) for one in attempts}
    try:
        for family in sorted(families):
            definitions_drop(cloud.aws_region, family, kept)
    except CallFailed as error:
        log.warning("task definitions of region %s were not deregistered: %s", cloud.pk, error)
