"""Upkeep of regions that are ECS clusters: the queue of task events, the list of tasks, container instances that drain,
and garbage. Events and lists write the same rows. A container instance that drains, or a task that ECS stops unasked,
is a notice of its machine, so that `fleet.faults.planning.notices` moves its cells before their tasks are stopped."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.db.models import Q, QuerySet

from fleet.clouds.aws.calls import CallFailed, Refused
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import Message, UnreadableNotice
from fleet.clouds.ecs.cluster import (
    definitions_drop,
    instances_read,
    task_stop,
    task_tag,
    tasks_describe,
    tasks_list,
)
from fleet.clouds.ecs.definitions import STOP_TIMEOUT_S, family_of
from fleet.clouds.ecs.events import InstanceEvent, TaskEvent, parse
from fleet.clouds.ecs.provider import tasks_store
from fleet.clouds.ecs.units import PROVIDER, base_of, placed_of
from fleet.clouds.models import CloudNotice, CloudRegion, LaunchAttempt
from fleet.clouds.planning.task_tags import judge_stray, plan_tags, serves_of
from fleet.clouds.planning.tasks import OVER, TaskSeen
from fleet.clouds.planning.upkeep import Resource, ResourceKind
from fleet.clouds.selectors import nodes_serving
from fleet.clouds.services.garbage import GarbageSource, cloud_source, cloud_source_collect
from fleet.clouds.services.notices import notices_settle, queue_read
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.machines.planner import ENDED, Statement
from fleet.machines.services.reports import notice_record
from fleet.reconcile.planning.states import MachineRole, MachineState, NoticeKind, NoticeSource
from kernel import clock

DRAINS = "its container instance drains"
DRAINING = "DRAINING"
UNREAD = "cluster-unread"
"""Kind of the incident of a region whose cluster cannot be read."""

log = logging.getLogger(__name__)


def cluster_queue(cloud: CloudRegion, now: datetime) -> None:
    """Reads the queue of task events, and the container instances if one of the region drains."""
    drains: set[str] = set()
    queue_read(cloud, now, partial(_handle_messages, drains))
    if drains and _placed_on(cloud, drains):
        cluster_instances(cloud, now)


def _handle_messages(drains: set[str], cloud: CloudRegion, messages: Sequence[Message], now: datetime) -> list[Message]:
    """Describes the tasks that events name, and stores the answer. Returns the messages to delete: all but unreadable
    ones, and those whose tasks could not be described now."""
    stated = cloud.stated_base().cluster
    done: list[Message] = []
    by_task: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        try:
            event = parse(message.body)
        except UnreadableNotice as error:
            log.warning("message %s of region %s is left for the dead letters: %s", message.id, cloud.pk, error)
            continue
        is_ours = stated is not None and event.cluster == stated.name
        if isinstance(event, TaskEvent) and is_ours:
            by_task[event.task].append(message)
            continue
        if isinstance(event, InstanceEvent) and is_ours and event.status == DRAINING:
            drains.add(event.instance)
        done.append(message)
    rows = list(_tasks_of(cloud).filter(provider_id__in=by_task).exclude(cloud_state__in=ENDED))
    if rows and stated is not None:
        try:
            found, missing = tasks_describe(cloud.aws_region, stated.name, [row.provider_id for row in rows])
        except CallFailed as error:
            log.warning("tasks of region %s were not described: %s", cloud.pk, error)
            for row in rows:
                by_task.pop(row.provider_id, None)
        else:
            _tasks_seen(rows, found, now, missing)
    return [*done, *(message for named in by_task.values() for message in named)]


def _tasks_seen(
    rows: Sequence[Machine], found: Sequence[TaskSeen], now: datetime, missing: Collection[str] = ()
) -> None:
    """Stores the states of tasks, and a notice of each that ECS stops without a request."""
    tasks_store(rows, found, now, missing)
    by_id = {row.provider_id: row for row in rows}
    for task in found:
        if task.is_ended_by_ecs and task.id in by_id:
            at = task.stopping_at or now
            notice_record(
                machine=by_id[task.id],
                kind=NoticeKind.INTERRUPTION,
                source=NoticeSource.EVENTS,
                statement=Statement(f"{task.id}/{task.code}", at, at + timedelta(seconds=STOP_TIMEOUT_S)),
                text=task.why,
                now=now,
            )


def _placed_on(cloud: CloudRegion, instances: Collection[str]) -> bool:
    """Whether a task without an open notice of retirement is on one of these container instances (ARNs)."""
    announced = CloudNotice.objects.filter(settled_at=None, kind=NoticeKind.RETIREMENT).values("machine_id")
    rows = _tasks_of(cloud).exclude(cloud_state__in=ENDED).exclude(pk__in=announced).select_related("launched_by")
    return any((placed := placed_of(row)) is not None and placed.arn in instances for row in rows)


def _tasks_of(cloud: CloudRegion) -> "QuerySet[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)


def cluster_list(cloud: CloudRegion, now: datetime) -> None:
    """Lists the tasks of this install and stores their states, tags them, and stops those that no row references.
    Blocks as long as the cloud does."""
    stated = cloud.stated_base().cluster
    if stated is None:
        return
    install = install_ensure(now).id
    try:
        found = tasks_list(cloud.aws_region, stated.name)
    except CallFailed as error:
        _cluster_unread(cloud, stated.name, error, now)
        return
    incidents_close(kind=UNREAD, subject=cloud.pk, resolution="it is read again", now=now)
    # By ID and not by tags, which others may remove. Tasks of another cluster are not in this list.
    rows = list(_tasks_of(cloud).filter(Q(launched_by=None) | Q(launched_by__base__cluster=stated.name)))
    listed = {task.id for task in found}
    _tasks_seen(rows, found, now, {row.provider_id for row in rows} - listed)
    tasks = [task for task in found if task.install == install]
    CloudRegion.objects.filter(pk=cloud.pk).update(listed_at=now)
    notices_settle(cloud, now)
    _tags_follow(cloud, tasks)
    cloud_source_collect(cloud, _task_garbage(cloud, stated.name, tasks), clock.now())


def _cluster_unread(cloud: CloudRegion, cluster: str, error: CallFailed, now: datetime) -> None:
    """Nothing is concluded about tasks: agents of a deleted cluster may run on. A refusal needs an operator."""
    log.warning("region %s was not listed: %s", cloud.pk, error)
    if isinstance(error, Refused) and not error.is_for_now:
        summary = f"Cluster {cluster} of {cloud.pk} cannot be read; its tasks are neither started nor watched: {error}"
        incident_open(kind=UNREAD, subject=cloud.pk, summary=summary, evidence={}, now=now, region=cloud.pk)


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
    draining = {one.arn for one in instances if one.status == DRAINING}
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
