"""The lag of control loops and housekeeping, with its limits for pages and incidents. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from kernel.ages import age_text

HOUSEKEEPING = "housekeeping"
"""The row of Celery's worker, next to those of the loops."""
LATE_AFTER_S = 10.0
"""Pages show a loop as late from here on: ten passes are missing."""
HEARTBEAT_EVERY_S = 5.0
"""Interval of the task that records the age of the queue (controlplane.celery)."""
STALE_AFTER_S = 30.0
"""Limit for an incident: longer than the lease of a dead controller, its restart and one slow pass together."""


@dataclass(frozen=True, slots=True)
class LoopAge:
    """One loop: seconds since its last complete pass, its duration, and the wait of its message."""

    loop: str
    age_s: float
    took_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class ControlStanding:
    """The lag of control loops and housekeeping. None if unknown, as with a new database."""

    loops: tuple[LoopAge, ...]
    queue_s: float | None

    @property
    def last_pass_s(self) -> float | None:
        """Age of the last pass of the loop that is most behind."""
        return max((loop.age_s for loop in self.loops), default=None)

    @property
    def late(self) -> tuple[LoopAge, ...]:
        return tuple(loop for loop in self.loops if loop.age_s > LATE_AFTER_S)

    @property
    def stale(self) -> tuple[LoopAge, ...]:
        return tuple(loop for loop in self.loops if loop.age_s > STALE_AFTER_S)

    @property
    def is_late(self) -> bool:
        return bool(self.late) or (self.queue_s or 0.0) > STALE_AFTER_S

    def __str__(self) -> str:
        passed = "no pass yet" if self.last_pass_s is None else f"last pass {age_text(self.last_pass_s)} ago"
        return passed if self.queue_s is None else f"{passed}, queue {age_text(self.queue_s)} old"


def standing_of(ages: Iterable[LoopAge]) -> ControlStanding:
    """Returns the standing of all loops from their rows, in any order."""
    known = sorted(ages, key=lambda age: age.loop)
    loops = tuple(age for age in known if age.loop != HOUSEKEEPING)
    queues = [_queue_age_s(age) for age in known if age.loop == HOUSEKEEPING]
    return ControlStanding(loops, max(queues, default=None))


def _queue_age_s(queue: LoopAge) -> float:
    """Returns the wait of the last task plus the time since it, beyond the heartbeat's interval."""
    return max(0.0, queue.waited_s) + max(0.0, queue.age_s - HEARTBEAT_EVERY_S)
