"""What a node agent sees of its own node: the values that its planners decide from, and the limits they keep to.

Nothing here decides or does anything. Times named `_s` are seconds of one monotonic clock of the agent's choosing.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine_agent.protocol.messages import Assignment, Desired, Health
from engine_agent.protocol.proxy_messages import Pairs
from engine_agent.protocol.states import Phase


class ProcessKind(StrEnum):
    """The two processes that an agent runs for a cell; only a leader has a proxy."""

    ENGINE = "engine"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Membership:
    """Which start of which cell a process belongs to."""

    cell: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process that lives. `watched_since_s`: when the agent started or adopted it; `stopping`: told to end."""

    membership: Membership
    pid: int
    watched_since_s: float
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected end, or a start given up. `in_a_row` counts failures without a stable run in between."""

    membership: Membership
    reason: str
    at_s: float
    in_a_row: int = 1


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What runs on this node now.

    `health` is the engine's, None before the first answer; `was_ready` says that it was healthy once in this start.
    `proxy_phase` is what the proxy says it does, `proxy_pairs` the name of its pairs, both None before it answered.
    `proxy_silent_since_s` is the first of its missed answers in a row. `failure` and `proxy_failure` stay until the
    process is started again. `no_contact_since_s`: when the control plane was last lost, None while the line is open.
    """

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


@dataclass(frozen=True, slots=True)
class ConvergeLimits:
    """How long an agent waits before it does the next harsher thing.

    The restart backoff and the contact grace (the silence after which a node is suspect) are design.md §4 and §7's.
    vLLM needs 3 to 8 s to end on SIGTERM. A cell proxy starts in under a second on a free core and may need several on
    a busy one; it ends once its streams have, within its own grace of 5 s.
    """

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
    """The start of the cell that an assignment speaks of."""
    return Membership(assignment.cell, assignment.generation, assignment.rank)


def failure_of(membership: Membership, failure: Failure | None) -> Failure | None:
    """The failure, if it is one of this start of the cell."""
    return failure if failure is not None and failure.membership == membership else None


def next_in_a_row(previous: Failure | None, ran_stably: bool) -> int:
    """Number of failures in a row that the next one makes; a stable run in between starts the count again."""
    return 1 if previous is None or ran_stably else previous.in_a_row + 1


def restart_backoff_s(failures_in_a_row: int, limits: ConvergeLimits = LIMITS) -> float:
    """Seconds between the last of so many failures in a row (>= 1) and the next start."""
    doublings = min(failures_in_a_row - 1, 16)
    return min(limits.backoff_max_s, limits.backoff_first_s * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the engine of this rank."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StartProxy:
    """Start the cell proxy beside this leader."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine: ask, and after `grace_s` force."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StopProxy:
    """End the cell proxy: ask, and after `grace_s` force."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPhase:
    """Tell the running proxy to serve or to drain."""

    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPairs:
    """Tell the running proxy which cells its own pairs with."""

    pairs: Pairs
    reason: str


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Give up this start of the engine, and keep it given up."""

    membership: Membership
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s`, or before something changes if that is None."""

    until_s: float | None
    reason: str


Step = StartEngine | StartProxy | StopEngine | StopProxy | SetProxyPhase | SetProxyPairs | MarkFailed | Wait


def refusal(in_force: Desired | None, received: Desired, node_id: str, running: Membership | None = None) -> str | None:
    """Why the received order must not replace the one in force, or None if it may. `running`: as what a process of
    this node still runs, whatever the order in force says.

    An order of the same cell and generation may change the phase, and nothing else that a running engine depends on.
    """
    if received.node != node_id:
        return f"it is for node {received.node}; this is {node_id}"
    if in_force is not None and received.version < in_force.version:
        return f"its version {received.version} is older than {in_force.version}"
    held = in_force.assignment if in_force is not None else None
    known = (None if held is None else membership_of(held), running)
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
