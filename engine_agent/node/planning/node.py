"""Values of a node for its planners: processes, failures, limits and steps, and which orders it accepts. Nothing here
starts or stops anything. Times named `_s` are seconds of one monotonic clock of the agent."""

from dataclasses import dataclass
from enum import StrEnum

from engine_agent.protocol.messages import Assignment, Desired, Health
from engine_agent.protocol.proxy_messages import Pairs
from engine_agent.protocol.states import Phase


class ProcessKind(StrEnum):
    """The two processes of a cell's node; only a leader has a proxy."""

    ENGINE = "engine"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Membership:
    """The start of a cell that a process belongs to."""

    cell: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A live process. `watched_since_s`: when the agent started or adopted it; `stopping`: it was told to stop."""

    membership: Membership
    pid: int
    watched_since_s: float
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected exit, or a start that was given up. `in_a_row` counts failures without a stable run in between."""

    membership: Membership
    reason: str
    at_s: float
    in_a_row: int = 1


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The processes of this node and their state.

    `health` is the engine's, None before its first answer; `was_ready`: it was healthy once in this start.
    `proxy_phase` and `proxy_pairs` (the name of its pairs) are as the proxy reports them, None before it answered.
    `proxy_silent_since_s` is the first of its consecutive missed answers. `failure` and `proxy_failure` stay until the
    process is started again. `no_contact_since_s`: when contact with the control plane was lost, None while connected.
    `before_start`: what the engine waits for before its start: its build, or its turn on a shared device."""

    engine: RunningProcess | None = None
    proxy: RunningProcess | None = None
    health: Health | None = None
    was_ready: bool = False
    proxy_phase: Phase | None = None
    proxy_pairs: str | None = None
    proxy_silent_since_s: float | None = None
    failure: Failure | None = None
    proxy_failure: Failure | None = None
    no_contact_since_s: float | None = None
    before_start: str = ""


@dataclass(frozen=True, slots=True)
class ConvergeLimits:
    """How long an agent waits before its next harsher step.

    The restart backoff and the contact grace (the silence after which a node is suspect) are from design.md §4 and §7.
    vLLM needs 3 to 8 s to exit after SIGTERM. A cell proxy starts in under a second on a free core and in several
    seconds on a busy one; it exits when its streams have ended, within its own grace of 5 s."""

    engine_stop_grace_s: float = 10.0
    proxy_stop_grace_s: float = 6.0
    proxy_start_s: float = 15.0
    proxy_silent_s: float = 5.0
    proxy_silence_tolerated_s: float = 2.0
    proxy_failures_tolerated: int = 4
    contact_grace_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 30.0
    stable_after_s: float = 60.0


LIMITS = ConvergeLimits()


def membership_of(assignment: Assignment) -> Membership:
    return Membership(assignment.cell, assignment.generation, assignment.rank)


def failure_of(membership: Membership, failure: Failure | None) -> Failure | None:
    """The failure, if it belongs to this start of the cell."""
    return failure if failure is not None and failure.membership == membership else None


def next_in_a_row(previous: Failure | None, ran_stably: bool) -> int:
    """The `in_a_row` of the next failure; a stable run in between restarts the count."""
    return 1 if previous is None or ran_stably else previous.in_a_row + 1


def restart_backoff_s(failures_in_a_row: int, limits: ConvergeLimits = LIMITS) -> float:
    """Seconds between the last of this many failures in a row (>= 1) and the next start."""
    doublings = min(failures_in_a_row - 1, 16)
    return min(limits.backoff_max_s, limits.backoff_first_s * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class StartEngine:
    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StartProxy:
    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop the engine: SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StopProxy:
    """Stop the cell proxy: SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPhase:
    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPairs:
    pairs: Pairs
    reason: str


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Give up this start of the engine permanently."""

    membership: Membership
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s`, or before a change if that is None."""

    until_s: float | None
    reason: str


Step = StartEngine | StartProxy | StopEngine | StopProxy | SetProxyPhase | SetProxyPairs | MarkFailed | Wait


def refusal(in_force: Desired | None, received: Desired, node_id: str, running: Membership | None = None) -> str | None:
    """Why the received order must not replace the one in force, or None (invariant I5). `running`: the membership of a
    running process, whatever the order in force says. An order of the same cell and generation may change the phase,
    and nothing that a running engine depends on."""
    if received.node != node_id:
        return f"it is for node {received.node}; this is {node_id}"
    if in_force is not None and received.version < in_force.version:
        return f"its version {received.version} is older than {in_force.version}"
    previous = in_force.assignment if in_force is not None else None
    known = (None if previous is None else membership_of(previous), running)
    return next(filter(None, (_goes_back(received.assignment, member) for member in known)), None)


def _goes_back(offered: Assignment | None, known: Membership | None) -> str | None:
    if offered is None or known is None or offered.cell != known.cell:
        return None
    if offered.generation < known.generation:
        return f"generation {offered.generation} of {offered.cell} is older than {known.generation}"
    if offered.generation == known.generation and offered.rank != known.rank:
        place = f"generation {known.generation} of {known.cell}"
        return f"rank {offered.rank} in {place}, where this node is rank {known.rank}"
    return None
