"""Whether a batch will miss its deadline at the rate that it has, and what is done about it, step by step: what is left
of it is sent as near-real-time, the plan of the day is asked for cells, its owner is told. Pure.

The planned rate is what has to be answered a second so that a tenth of its window is left in the end. A batch below it
is at risk. The policy of its deployment says how far that may go; each step has its time to help before the next one,
unless there is none left. No step is taken twice: telling it again with each turn of its rate would help nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

RESERVE = 0.1
"""Of the whole window, that must be left."""
SETTLES_S, SETTLES_SHARE = 600.0, 0.1
"""A rate says nothing before so long, or so much of the window, is over: windows start slowly, and turns take time."""


class AtRiskPolicy(StrEnum):
    """What an operator wants done. Tell: its owner is told. Near-real-time: it is sent as that first. Cells: and the
    plan of the day buys cells for it."""

    TELL = "tell"
    NEAR_REALTIME = "near_realtime"
    CELLS = "cells"


class PaceStep(StrEnum):
    """What can be done, in this order."""

    RAISE = "raise"
    ASK = "ask"
    TELL = "tell"


STEPS = {
    AtRiskPolicy.TELL: (PaceStep.TELL,),
    AtRiskPolicy.NEAR_REALTIME: (PaceStep.RAISE, PaceStep.TELL),
    AtRiskPolicy.CELLS: (PaceStep.RAISE, PaceStep.ASK, PaceStep.TELL),
}


@dataclass(frozen=True, slots=True)
class PacedBatch:
    """A batch in progress. `began_at`: of its run; `since`: of what `rate` was seen over, the last step or `began_at`.
    `rate`: lines a second since then, or of its model as of late where it has none; 0: not known. `may_raise`: whether
    its key may send as near-real-time at all. `taken`: the steps so far; `done`: lines answered so far."""

    id: str
    began_at: datetime
    expires_at: datetime
    remaining: int
    rate: float
    policy: AtRiskPolicy = AtRiskPolicy.TELL
    may_raise: bool = True
    taken: frozenset[PaceStep] = frozenset()
    since: datetime | None = None
    done: int = 0

    @property
    def reserve(self) -> timedelta:
        return (self.expires_at - self.began_at) * RESERVE

    @property
    def next_steps(self) -> tuple[PaceStep, ...]:
        """What may be done yet, in its order."""
        allowed = (step for step in STEPS[self.policy] if self.may_raise or step is not PaceStep.RAISE)
        return tuple(step for step in allowed if step not in self.taken)

    def planned_rate(self, now: datetime) -> float:
        """Lines a second from now on; infinite, where the reserve is used up."""
        left_s = (self.expires_at - self.reserve - now).total_seconds()
        return self.remaining / left_s if left_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Pace:
    """What is done about one batch, of which `done` lines were answered by then."""

    batch: str
    steps: tuple[PaceStep, ...]
    reason: str
    done: int = 0


def plan_paces(batches: Iterable[PacedBatch], now: datetime) -> tuple[Pace, ...]:
    """Those that something is done about now, the ones with the least time first."""
    ordered = sorted(batches, key=lambda batch: (batch.expires_at, batch.id))
    return tuple(pace for batch in ordered if (pace := _pace(batch, now)) is not None)


def _pace(batch: PacedBatch, now: datetime) -> Pace | None:
    """One step at a time; once the reserve is used up nothing has time to help, and all that is left is done."""
    steps, planned = batch.next_steps, batch.planned_rate(now)
    has_time = planned < float("inf")
    if not steps or not batch.remaining or now >= batch.expires_at or (has_time and not _has_settled(batch, now)):
        return None
    if batch.rate >= planned:
        return None
    if not batch.rate and has_time and not batch.taken:
        return None  # nothing is known, and there is time to learn it
    wanted = f"{planned:.3g} lines a second are needed" if has_time else "less than a tenth of its time is left"
    reason = f"{wanted} and {batch.rate:.3g} are answered; {batch.remaining} lines are left"
    return Pace(batch.id, steps[:1] if has_time else steps, reason, batch.done)


def _has_settled(batch: PacedBatch, now: datetime) -> bool:
    over_s = (now - (batch.since or batch.began_at)).total_seconds()
    window_s = (batch.expires_at - batch.began_at).total_seconds()
    return over_s >= min(SETTLES_S, SETTLES_SHARE * window_s)
