"""Takes the steps of launch units in an ECS cluster, as `fleet.clouds.planning.tasks` decides from rows. An attempt is
written before `StartTask`, whose answer may be lost, with the container instances that were chosen for it. Its tasks
become `Machine`s when all of them run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import msgspec
from django.conf import settings
from django.db import transaction

from fleet.agents.selectors import server_pin
from fleet.capacity.planning.pools import LaunchOutcome
from fleet.clouds.aws import calls
from fleet.clouds.aws.attempts import machine_id, unit_close, until_s
from fleet.clouds.aws.identity import install_that_may_change
from fleet.clouds.aws.provider import cloud_region
from fleet.clouds.base import Later, NoCapacity, ProviderError, Unknown
from fleet.clouds.ecs.cluster import (
    addresses_of,
    definition_ensure,
    instances_place,
    instances_read,
    task_stop,
    tasks_found,
    tasks_running,
    tasks_start,
)
from fleet.clouds.ecs.definitions import Cluster, Start, start_task, task_definition
from fleet.clouds.models import CloudRegion, ImageMove, LaunchAttempt, LaunchUnit, TaskImage
from fleet.clouds.planning.starts import back_off, instances_avoided
from fleet.clouds.planning.tasks import (
    NO_ROOM_AGAIN_S,
    Cancelled,
    ContainerInstance,
    End,
    FindTasks,
    Keep,
    NoRoom,
    Started,
    StartUnit,
    TaskAttempt,
    TaskSeen,
    WaitFor,
    after_answers,
    after_search,
    choose_instances,
    may_adopt,
    next_task_step,
    started_by_of,
)
from fleet.clouds.planning.upkeep import ImageState, takes_new
from fleet.clouds.selectors import image_machines, task_starts, units_under_way
from fleet.machines.models import Machine, ProviderCall
from fleet.machines.planner import ENDED
from fleet.reconcile.planning.states import MachineRole, MachineState, ProviderAction
from kernel import clock, live
from models_registry.instance_types.selectors import instance_shapes

PROVIDER = "ecs"
IN_DOUBT_RETRY_S = 5.0
REFUSED_AGAIN_S = 60.0
"""An operator must first change something."""
PATH_LEAST = 2
"""Parts of a known place: its zone and at least one network node."""


class Placed(msgspec.Struct, frozen=True):
    """A container instance as of the launch; `machine`: ID of its EC2 instance."""

    arn: str
    machine: str
    zone: str
    address: str
    path: tuple[str, ...]


class TaskBase(msgspec.Struct, frozen=True):
    """Stored as `LaunchAttempt.base`. `placed`: by subject, in order."""

    region: str
    cluster: str
    definition: str
    placed: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Read before the transaction that writes an attempt. `adopted`: tasks that this attempt has started already,
    although no row says so, because a backup was restored."""

    cluster: Cluster
    image: str
    definition: str
    instances: tuple[ContainerInstance, ...]
    memory_mib: int
    avoided: frozenset[str]
    adopted: tuple[TaskSeen, ...] = ()


def cluster_of(cloud: CloudRegion, install: str, now: datetime) -> Cluster:
    """Returns the cluster of a region. Raises ProviderError if its stack has none."""
    stated = cloud.stated_base().cluster
    if stated is None:
        raise ProviderError(f"stack {cloud.stack} of {cloud.pk} has no ECS cluster: deploy it from deploy/aws/ecs.yaml")
    return Cluster(
        name=stated.name,
        aws_region=cloud.aws_region,
        install=install,
        task_role=stated.task_role,
        ingress_role=stated.ingress_role,
        execution_role=stated.execution_role,
        image=stated.image,
        ingress_image=stated.ingress_image,
        log_group=stated.log_group,
        server=settings.AGENT_URLS[0],
        pin=server_pin(now),
    )


def unit_advance(unit_id: str, subjects: Sequence[str]) -> LaunchAttempt | None:
    """Takes one step for a unit whose nodes are `subjects`; empty: it is no longer wanted, and tasks of an attempt in
    doubt are stopped. Returns the attempt that launched it, or None if nothing of it runs. Raises ProviderError as
    `NodeProvider.launch` does."""
    now = clock.now()
    install = install_that_may_change(now).id
    unit = LaunchUnit.objects.get(pk=unit_id)
    cloud = cloud_region(unit.region_id)
    prepared: _Prepared | None = None
    while True:
        with transaction.atomic():
            unit = LaunchUnit.objects.select_for_update(of=("self",)).get(pk=unit_id)
            rows = {row.number: row for row in unit.attempts.all()}
            step = next_task_step([_attempt_view(row) for row in rows.values()], wanted=bool(subjects), now=now)
            row = None
            if isinstance(step, StartUnit) and prepared is not None:
                row = _attempt_write(unit, step.number, subjects, cloud, prepared, install, now)
            if isinstance(step, Cancelled):
                unit_close(unit, step.reason, now)
        match step:
            case Started(attempt):
                return rows[attempt.number]
            case Cancelled(reason):
                if subjects:
                    raise ProviderError(f"{unit.pk}: {reason}")
                return None
            case WaitFor(until, reason):
                raise Later(reason, until_s(until, now))
            case FindTasks(attempt):
                return _attempt_search(rows[attempt.number], wanted=bool(subjects))
        if isinstance(row, ProviderError):
            raise row
        if row is not None and prepared is not None:
            return _attempt_search(row, wanted=True) if prepared.adopted else _attempt_call(row, prepared.cluster)
        prepared = _prepare(unit, step.number, len(subjects), cluster_of(cloud, install, now))


def _attempt_view(row: LaunchAttempt) -> TaskAttempt:
    outcome = LaunchOutcome(row.outcome) if row.outcome else None
    return TaskAttempt(row.number, len(row.subjects), row.called_at, outcome, row.again_at, row.ended_at)


def base_of(row: LaunchAttempt) -> TaskBase:
    return msgspec.convert(row.base, TaskBase)


def _prepare(unit: LaunchUnit, number: int, count: int, cluster: Cluster) -> _Prepared:
    """Registers the task definition and reads the cluster; asks for the network nodes of instances without any.
    Searches for tasks of this attempt, and stops those that cannot be adopted."""
    shape = instance_shapes([unit.instance_type_id])[unit.instance_type_id]
    image = image_of_launch(unit, cluster)
    cluster = replace(cluster, image=image)
    now = clock.now()
    starts = task_starts(unit.region_id, unit.instance_type_id, MachineRole(unit.role), now)
    waits = back_off(starts, image)
    if waits is not None and waits.until > now:
        raise Later(waits.sentence, until_s(waits.until, now))
    try:
        definition = task_definition(shape, MachineRole(unit.role), cluster)
        memory_mib = definition["containerDefinitions"][0]["memoryReservation"]
        revision = definition_ensure(cluster.aws_region, definition, cluster.install)
        instances = [
            one
            for one in instances_read(cluster.aws_region, cluster.name)
            if one.instance_type == unit.instance_type_id
        ]
        instances = _with_places(cluster, instances)
        started = tasks_running(cluster.aws_region, cluster.name, started_by_of(cluster.install, unit.pk, number))
        adopted = may_adopt(started, count, {one.arn for one in instances})
        for task in started if not adopted else ():
            task_stop(cluster.aws_region, cluster.name, task.id, f"switchyard: {unit.pk} begins again")
    except ValueError as error:
        raise Later(str(error), REFUSED_AGAIN_S) from error
    except calls.CallFailed as error:
        raise _not_started(f"nothing of {unit.pk} is started yet", error) from error
    if started and not adopted:
        raise Later(f"{len(started)} tasks of {unit.pk} that no row knows are stopped first", IN_DOUBT_RETRY_S)
    avoided = instances_avoided(starts, now)
    return _Prepared(cluster, image, revision, tuple(instances), memory_mib, avoided, tuple(started))


def image_of_launch(unit: LaunchUnit, cluster: Cluster) -> str:
    """Returns the image of the next tasks of a unit. That of nodes changes only by a move; ingresses use the one that
    the stack states."""
    if unit.role != MachineRole.NODE:
        return cluster.ingress_image
    key = {"region_id": unit.region_id, "instance_type_id": unit.instance_type_id}
    row, _ = TaskImage.objects.get_or_create(**key, defaults={"image": cluster.image})
    move = ImageMove.objects.filter(**key, ended_at=None).first() if row.next_image else None
    if move is None:
        return row.image
    is_new = takes_new(ImageState(move.state), image_machines(move), units_under_way(move))
    return row.next_image if is_new else row.image


def _with_places(cluster: Cluster, instances: list[ContainerInstance]) -> list[ContainerInstance]:
    """Requests network nodes that are not known yet. Instances keep their zone alone if EC2 refuses it, as for types
    without a topology. Raises CallFailed if it may succeed later."""
    unplaced = [one for one in instances if len(one.path) < PATH_LEAST]
    if not unplaced:
        return instances
    try:
        places = {one.arn: one for one in instances_place(cluster.aws_region, cluster.name, unplaced)}
    except calls.Refused as error:
        if error.is_for_now:
            raise
        return instances
    return [places.get(one.arn, one) for one in instances]


def _not_started(text: str, error: calls.CallFailed) -> Later:
    """Nothing was done: the calls so far only read, or may be repeated. After a refusal, such as a cluster that was
    deleted, the node waits for an operator and states the reason: another node would be refused as well."""
    if isinstance(error, calls.Refused) and not error.is_for_now:
        return Later(f"{text}: {error}", REFUSED_AGAIN_S)
    until = error.not_before if isinstance(error, calls.Refused) else None
    return Later(f"{text}: {error}", until_s(until, clock.now()) if until is not None else None)


def _attempt_write(
    unit: LaunchUnit,
    number: int,
    subjects: Sequence[str],
    cloud: CloudRegion,
    prepared: _Prepared,
    install: str,
    now: datetime,
) -> LaunchAttempt | ProviderError:
    """Chooses container instances and writes the attempt, in the transaction that holds the unit's lock. The lock of
    the region keeps two launches from choosing the same ones. Errors are returned, so that the stored rows stay."""
    cloud = CloudRegion.objects.select_for_update().get(pk=cloud.pk)
    if unit.role == MachineRole.NODE and (missing := _given_back(subjects)):
        return Later(f"{', '.join(missing)} of {unit.pk} was given back in the meantime")
    if image_of_launch(unit, prepared.cluster) != prepared.image:
        return Later(f"another image is chosen for {unit.pk}", IN_DOUBT_RETRY_S)
    taken = instances_taken(cloud.pk)
    by_arn = {one.arn: one for one in prepared.instances}
    chosen = tuple(by_arn[one.instance] for one in prepared.adopted) or choose_instances(
        unit.instance_type_id,
        len(subjects),
        tuple(unit.near),
        prepared.instances,
        taken,
        prepared.memory_mib,
        cloud.alarmed,
        prepared.avoided,
    )
    if isinstance(chosen, NoRoom):
        unit.reason = chosen.reason
        unit.save(update_fields=["reason"])
        return NoCapacity(chosen.reason, NO_ROOM_AGAIN_S)
    placed = tuple(Placed(one.arn, one.machine, one.zone, "", one.path) for one in chosen)
    base = TaskBase(cloud.aws_region, prepared.cluster.name, prepared.definition, placed)
    unit.ended_at, unit.reason = None, f"attempt {number}: {prepared.definition} on {len(placed)} container instances"
    unit.save(update_fields=["ended_at", "reason"])
    return LaunchAttempt.objects.create(
        unit=unit,
        number=number,
        pool_seen={"image": prepared.image},
        base=msgspec.to_builtins(base),
        token=started_by_of(install, unit.pk, number),
        subjects=list(subjects),
        begun_at=now,
        called_at=now,
    )


def _given_back(subjects: Sequence[str]) -> list[str]:
    """Nodes whose order was withdrawn while this process slept. Giving back waits for this transaction."""
    orders = ProviderCall.objects.select_for_update(of=("self",)).filter(node_id__in=subjects)
    ordered = set(orders.filter(action=ProviderAction.LAUNCH).order_by("node_id").values_list("node_id", flat=True))
    return sorted(set(subjects) - ordered)


def instances_taken(region: str) -> set[str]:
    """Returns the ARNs of the container instances with a recorded task, or with one that may be starting."""
    taken: set[str] = set()
    for attempt in LaunchAttempt.objects.filter(unit__region_id=region, ended_at=None):
        taken |= {one.arn for one in base_of(attempt).placed}
    machines = Machine.objects.filter(provider=PROVIDER, region_id=region).exclude(state=MachineState.GONE)
    for machine in machines.exclude(cloud_state__in=ENDED).select_related("launched_by"):
        if (placed := placed_of(machine)) is not None:
            taken.add(placed.arn)
    return taken


def placed_of(machine: Machine) -> Placed | None:
    """Returns the container instance of a task; None if its launch is not recorded any more."""
    attempt = machine.launched_by
    if attempt is None or machine.runs not in attempt.subjects:
        return None
    index: int = attempt.subjects.index(machine.runs)
    return base_of(attempt).placed[index]


def _attempt_call(row: LaunchAttempt, cluster: Cluster) -> LaunchAttempt | None:
    """Makes the calls of a stored attempt and applies their answers. A call without an answer leaves it in doubt."""
    base = base_of(row)
    start = Start(row.unit_id, row.number, row.token, base.definition, tuple(one.arn for one in base.placed))
    tasks: list[TaskSeen] = []
    reasons: list[str] = []
    try:
        for nth, request in enumerate(start_task(start, cluster)):
            if nth:
                LaunchAttempt.objects.filter(pk=row.pk).update(called_at=clock.now())
            started, failed = tasks_start(base.region, request)
            tasks += started
            reasons += failed
            if failed:
                break
    except calls.Refused as error:
        outcome = LaunchOutcome.LATER if error.is_for_now or _is_inactive(error) else LaunchOutcome.REFUSED
        return _after_refusal(row, tasks, outcome, str(error))
    except calls.CallFailed as error:
        _attempt_keep(row, Keep(clock.now() + timedelta(seconds=IN_DOUBT_RETRY_S)), str(error))
        raise Unknown(f"whether {row} started its tasks is not known: {error}") from error
    step = after_answers(_attempt_view(row), tasks, reasons, clock.now())
    return _attempt_apply(row, step, ", ".join(reasons) or f"{len(tasks)} tasks", wanted=True)


def _is_inactive(error: calls.Refused) -> bool:
    """Whether the revision was deregistered since it was found. The next attempt registers another."""
    return "taskdefinition is inactive" in error.text.lower()


def _after_refusal(
    row: LaunchAttempt, tasks: list[TaskSeen], outcome: LaunchOutcome, text: str
) -> LaunchAttempt | None:
    """A refused call starts nothing; earlier calls of a large unit may have."""
    if not tasks:
        return _attempt_apply(row, End(outcome), text, wanted=True)
    again = clock.now() + timedelta(seconds=IN_DOUBT_RETRY_S)
    return _attempt_apply(row, Keep(again, outcome, tuple(one.id for one in tasks)), text, wanted=True)


def _attempt_search(row: LaunchAttempt, *, wanted: bool) -> LaunchAttempt | None:
    """Searches for an attempt's tasks by `startedBy`."""
    base = base_of(row)
    found: list[TaskSeen] = []
    complete = True
    try:
        found = tasks_found(base.region, base.cluster, row.token)
    except calls.CallFailed:
        complete = False
    step = after_search(_attempt_view(row), found, complete=complete, wanted=wanted, now=clock.now())
    whys = sorted({one.why for one in found if one.why})
    text = f"a search found {len(found)} of {len(row.subjects)} tasks{': ' if whys else ''}{'; '.join(whys)}"
    text = row.text if row.outcome else text
    return _attempt_apply(row, step, text, wanted=wanted)


def _attempt_apply(row: LaunchAttempt, step: Keep | End, text: str, *, wanted: bool) -> LaunchAttempt | None:
    """Stores a step, with the machines of a launch, and stops tasks of an incomplete unit."""
    base = base_of(row)
    if isinstance(step, Keep):
        _attempt_keep(row, step, text)
        for task in step.stop:
            _stop_quietly(base, task, f"switchyard: {row} is not complete" if wanted else "switchyard: not wanted")
        raise Later(f"{row}: {text}", until_s(step.again_at, clock.now()))
    addresses: dict[str, str] = {}
    if step.outcome is LaunchOutcome.LAUNCHED:
        try:
            addresses = addresses_of(base.region, [one.machine for one in base.placed])
        except calls.CallFailed as error:
            _attempt_keep(row, Keep(clock.now() + timedelta(seconds=IN_DOUBT_RETRY_S)), text)
            raise Later(f"{row}: the addresses of its container instances are not known yet: {error}") from error
    now = clock.now()
    with transaction.atomic():
        unit = LaunchUnit.objects.select_for_update().get(pk=row.unit_id)
        row = LaunchAttempt.objects.select_related("unit").get(pk=row.pk)
        if row.ended_at is None:
            row.outcome, row.text, row.ended_at = step.outcome.value, text, now
            row.save(update_fields=["outcome", "text", "ended_at"])
            _machines_record(row, step.tasks, addresses, now)
            if step.outcome in (LaunchOutcome.LAUNCHED, LaunchOutcome.REFUSED) or not wanted:
                unit_close(unit, f"attempt {row.number}: {text}", now)
    if row.outcome == LaunchOutcome.LAUNCHED:
        return row
    if not wanted:
        return None
    raise _error_of(row, text)


def _error_of(row: LaunchAttempt, text: str) -> ProviderError:
    """The next call begins the next attempt, on other container instances if these lack room."""
    match row.outcome:
        case LaunchOutcome.NO_CAPACITY:
            return NoCapacity(f"{row}: {text}")
        case LaunchOutcome.REFUSED:
            return ProviderError(f"{row}: {text}")
    return Later(f"{row}: {text}")


def _attempt_keep(row: LaunchAttempt, step: Keep, text: str) -> None:
    open_rows = LaunchAttempt.objects.filter(pk=row.pk, ended_at=None)
    open_rows.update(outcome=step.outcome.value if step.outcome else "", again_at=step.again_at, text=text)


def _stop_quietly(base: TaskBase, task: str, reason: str) -> None:
    """The search that follows finds tasks that were not stopped."""
    try:
        task_stop(base.region, base.cluster, task, reason)
    except calls.CallFailed:
        return


def _machines_record(
    row: LaunchAttempt, tasks: Sequence[TaskSeen], addresses: Mapping[str, str], now: datetime
) -> None:
    """Stores a unit's tasks, each as the machine of the subject whose container instance it runs on."""
    base, by_instance = base_of(row), {task.instance: task for task in tasks}
    for subject, placed in zip(row.subjects, base.placed, strict=True) if tasks else ():
        task = by_instance.get(placed.arn)
        if task is None:
            continue  # garbage collection stops it
        Machine.objects.get_or_create(
            provider=PROVIDER,
            provider_id=task.id,
            defaults={
                "id": machine_id(str(subject)),
                "region_id": row.unit.region_id,
                "role": row.unit.role,
                "state": MachineState.TAKEN.value,
                "reason": f"it is {subject}",
                "runs": str(subject),
                "address": addresses.get(placed.machine, ""),
                "instance_type_id": row.unit.instance_type_id,
                "type_stated": True,
                "launched_by": row,
                "zone": placed.zone,
                "image": row.pool_seen.get("image", ""),
                "cloud_state": task.status,
                "cloud_seen_at": now,
                "created_at": now,
                "state_since": now,
            },
        )
    if tasks:
        live.push("machines")
