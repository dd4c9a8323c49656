"""What a node agent sees of its own node: the values that its planners decide from, and the limits they keep to.

Nothing here decides or does anything. Times named `_s` are seconds of one monotonic clock of the agent's choosing.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine_agent.protocol.messages import Assignment, Health
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
