"""Decides how the nodes of a unit become tasks of an ECS cluster: on which container instances, when `StartTask` may be
repeated, and what a task's state proves. Pure. `StartTask` has no client token and starts some tasks of a call without
the others, so a call without an answer is never repeated: its tasks are searched for by `startedBy`. A unit whose tasks
did not all start is stopped as a whole, and a new attempt with a new `startedBy` begins."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from fleet.capacity.planning.pools import LaunchOutcome
from fleet.clouds.planning.launches import token_of
from fleet.placement.planning.distance import Path, shared_prefix
from fleet.reconcile.planning.snapshot import ProviderStatus

STARTED_BY_MOST = 36
"""Characters: ECS's documents of `StartTask`; later ones allow 128."""
VISIBLE_AFTER = timedelta(seconds=60)
"""After this long a started task is in every list. ECS states no figure, and describes delays of seconds."""
AGAIN_LEAST = timedelta(seconds=5)
AGAIN_MOST = timedelta(seconds=60)
NO_ROOM_AGAIN_S = 30.0
TAG_NODE = "switchyard:node"
RUNNING, STOPPED, DELETED = "RUNNING", "STOPPED", "DELETED"
BY_ECS = frozenset({"SpotInterruption", "TerminationNotice", "ServiceSchedulerInitiated"})
"""Stop codes of stops that neither this fleet nor an operator requested."""
OVER = frozenset({STOPPED, DELETED})
"""Last states. A task that is stopping may still serve."""


@dataclass(frozen=True, slots=True)
class ContainerInstance:
    """A machine of the cluster. `path`: network nodes, widest first. `memory_mib`: that no task reserves; those
    of daemons need little."""

    arn: str
    machine: str
    instance_type: str
    zone: str
    path: Path
    status: str = "ACTIVE"
    connected: bool = True
    memory_mib: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    reason: str


def choose_instances(
    instance_type: str,
    count: int,
    near: Path,
    instances: Iterable[ContainerInstance],
    taken: Collection[str],
    memory_mib: int = 0,
    alarmed: Collection[str] = (),
    avoided: Collection[str] = (),
) -> tuple[ContainerInstance, ...] | NoRoom:
    """Returns the container instances of a unit: free ones under the smallest network node that has enough of them, the
    deepest below `near` first. `taken`: ARNs that belong to other launches, although ECS may not count their tasks yet.
    `memory_mib`: needed on each. `alarmed`: EC2 instances that an alarm may replace. `avoided`: ARNs on which the last
    tasks did not start."""
    alike = [one for one in instances if one.instance_type == instance_type]
    reasons = {one.arn: _refusal(one, taken, memory_mib, alarmed, avoided) for one in alike}
    free = [one for one in alike if not reasons[one.arn]]
    if len(free) < count:
        return NoRoom(_no_room(instance_type, count, list(reasons.values())))
    groups: dict[Path, list[ContainerInstance]] = {}
    for one in free:
        for depth in range(len(one.path) + 1):
            groups.setdefault(one.path[:depth], []).append(one)
    fits = [path for path, members in groups.items() if len(members) >= count]
    best = min(fits, key=lambda path: (-shared_prefix(path, near), -len(path), len(groups[path]), path))
    members = sorted(groups[best], key=lambda one: (-shared_prefix(one.path, near), one.path, one.arn))
    return tuple(members[:count])


def _refusal(
    one: ContainerInstance,
    taken: Collection[str],
    memory_mib: int,
    alarmed: Collection[str],
    avoided: Collection[str],
) -> str:
    if one.status != "ACTIVE":
        return one.status.lower()
    if not one.connected:
        return "without a connected ECS agent"
    if one.arn in taken:
        return "in use"
    if one.machine in alarmed:
        return "in an alarm"
    if one.arn in avoided:
        return "avoided after a failed start"
    return "" if one.memory_mib >= memory_mib else "short of memory"


def _no_room(instance_type: str, count: int, refusals: Sequence[str]) -> str:
    reasons = [reason or "free" for reason in refusals]
    counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))
    there = f"{len(reasons)} container instances of {instance_type} ({counted or 'none'})"
    return f"the cluster has {there}; {count} needed"


def started_by_of(install: str, unit: str, number: int) -> str:
    """Returns the `startedBy` of an attempt, by which its tasks are found again."""
    return token_of(install, unit, number)[:STARTED_BY_MOST]


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One try of a unit, written before its calls. `outcome`: None while it is not known; `no_capacity` or `refused` of
    an open one: some of its tasks were not started, and the others are being stopped. `ended_at` None: open."""

    number: int
    count: int
    called_at: datetime
    outcome: LaunchOutcome | None = None
    again_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """A task as ECS describes it. `code`: its `stopCode`, or ""; `why`: that with `stoppedReason` and the reasons of
    its containers. `id`: last part of its ARN. `install`, `unit` and `attempt`: from its `tags`, or ""."""

    id: str
    instance: str
    status: str
    desired: str = RUNNING
    code: str = ""
    why: str = ""
    started_by: str = ""
    install: str = ""
    unit: str = ""
    attempt: str = ""
    arn: str = ""
    created_at: datetime | None = None
    stopping_at: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return self.status not in OVER and self.desired == RUNNING

    @property
    def is_ended_by_ecs(self) -> bool:
        """Whether ECS is stopping it without a request, as for a spot interruption."""
        return self.status not in OVER and self.desired in OVER and self.code in BY_ECS


@dataclass(frozen=True, slots=True)
class StartUnit:
    """Write the next attempt and start its tasks."""

    number: int


@dataclass(frozen=True, slots=True)
class FindTasks:
    """Search for the tasks of an open attempt."""

    attempt: TaskAttempt


@dataclass(frozen=True, slots=True)
class WaitFor:
    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    attempt: TaskAttempt


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str


def next_task_step(
    attempts: Sequence[TaskAttempt], *, wanted: bool, now: datetime
) -> StartUnit | FindTasks | WaitFor | Started | Cancelled:
    """Returns the next step of a unit. `attempts`: all of it, in any order."""
    for attempt in attempts:
        if attempt.outcome is LaunchOutcome.LAUNCHED:
            return Started(attempt)
        if attempt.ended_at is None:
            if attempt.again_at is not None and attempt.again_at > now:
                return WaitFor(attempt.again_at, f"whether attempt {attempt.number} started its tasks is not known yet")
            return FindTasks(attempt)
    last = max(attempts, key=lambda one: one.number, default=None)
    if last is not None and last.outcome is LaunchOutcome.REFUSED:
        return Cancelled(f"attempt {last.number} was refused")
    if not wanted:
        return Cancelled("it is no longer wanted")
    return StartUnit(last.number + 1 if last is not None else 1)


@dataclass(frozen=True, slots=True)
class Keep:
    """The attempt stays open until at least `again_at`; `stop`: tasks to stop now. `outcome`: None if not known."""

    again_at: datetime
    outcome: LaunchOutcome | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """`tasks`: of a launch."""

    outcome: LaunchOutcome
    tasks: tuple[TaskSeen, ...] = ()


def after_answers(
    attempt: TaskAttempt, started: Sequence[TaskSeen], reasons: Sequence[str], now: datetime
) -> Keep | End:
    """Returns what follows if all calls of an attempt were answered. `reasons`: of the container instances that ECS
    refused. Started tasks of an incomplete unit are stopped, and the attempt ends after a search has confirmed it."""
    if not reasons and _places(started) == attempt.count:
        return End(LaunchOutcome.LAUNCHED, tuple(started))
    outcome = outcome_of_failures(reasons)
    return Keep(now + AGAIN_LEAST, outcome, tuple(one.id for one in started)) if started else End(outcome)


def after_search(
    attempt: TaskAttempt, found: Sequence[TaskSeen], *, complete: bool, wanted: bool, now: datetime
) -> Keep | End:
    """Returns what follows from the tasks that were found by an attempt's `startedBy`, running and stopped. If all run,
    it was launched. Any other number is stopped, and the attempt ends once every task that may still appear would be
    visible. `complete`: every page of both lists arrived."""
    alive = [one for one in found if one.is_alive]
    is_whole = len(alive) == len(found) == _places(found) == attempt.count
    if is_whole and wanted and attempt.outcome is None:
        return End(LaunchOutcome.LAUNCHED, tuple(found))
    settled = complete and now - attempt.called_at >= VISIBLE_AFTER
    again_at = now + min(max((now - attempt.called_at) / 2, AGAIN_LEAST), AGAIN_MOST)
    is_failed = attempt.outcome is not None or not wanted or len(alive) < len(found)
    if alive and (settled or is_failed):
        return Keep(again_at, attempt.outcome, tuple(one.id for one in alive))
    if alive or not settled:
        return Keep(again_at, attempt.outcome)
    return End(attempt.outcome or LaunchOutcome.ATTEMPT_ENDED)


def _places(tasks: Iterable[TaskSeen]) -> int:
    """The number of container instances that these tasks are on: one task each."""
    return len({one.instance for one in tasks})


def may_adopt(started: Sequence[TaskSeen], count: int, instances: Collection[str]) -> bool:
    """Whether running tasks with the `startedBy` of an attempt that is about to begin are this attempt: all of them, on
    known container instances, and none whose agent has joined for rows that are lost."""
    places = {one.instance for one in started} & set(instances)
    return len(started) == len(places) == count and not any(one.tags.get(TAG_NODE) for one in started)


ROOM = ("RESOURCE:", "AGENT", "MISSING", "INACTIVE", "DRAINING", "EMPTY CAPACITY PROVIDER")
"""Beginnings of reasons in `failures` that another container instance may not have."""


def outcome_of_failures(reasons: Sequence[str]) -> LaunchOutcome:
    """Returns the meaning of the `failures` in an answer of `StartTask`: an attribute or a placement constraint that
    does not fit needs an operator; anything else is a lack of room."""
    is_for_now = all(reason.upper().startswith(ROOM) for reason in reasons)
    return LaunchOutcome.NO_CAPACITY if is_for_now else LaunchOutcome.REFUSED


def task_status(state: str, *, connected: bool, reported: ProviderStatus, was_connected: bool) -> ProviderStatus:
    """Returns the status of a task's node. `gone` only if its end was seen or proven by lists. `state`: ECS's last
    status, or "". A container instance whose ECS agent is disconnected proves nothing: the task may serve."""
    if not state:
        return ProviderStatus.UNKNOWN
    if state in OVER or state == "gone":
        return ProviderStatus.GONE
    if connected:
        return reported
    return ProviderStatus.SILENT if was_connected else ProviderStatus.RUNNING
