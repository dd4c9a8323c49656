"""Whether a batch will miss its deadline at the rate that it has, and what is done about it: its owner is told, and,
where the operator wants that, what is left of it is sent as near-real-time. Pure.

The planned rate is what has to be answered a second so that a tenth of its window is left in the end. A batch below it
is at risk. It is once at risk: telling it again with each turn of its rate would help nobody.
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
    """What an operator wants done."""

    TELL = "tell"
    NEAR_REALTIME = "near_realtime"


@dataclass(frozen=True, slots=True)
class PacedBatch:
    """A batch in progress. `rate`: lines a second over its run, or of its model as of late where it has none; 0: not
    known. `may_raise`: whether its key may send as near-real-time at all."""

    id: str
    began_at: datetime
    expires_at: datetime
    remaining: int
    rate: float
    may_raise: bool = True
    is_at_risk: bool = False
    is_raised: bool = False

    @property
    def reserve(self) -> timedelta:
        return (self.expires_at - self.began_at) * RESERVE

    def planned_rate(self, now: datetime) -> float:
        """Lines a second from now on; infinite, where the reserve is used up."""
        left_s = (self.expires_at - self.reserve - now).total_seconds()
        return self.remaining / left_s if left_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Pace:
    """What is done about one batch."""

    batch: str
    raises: bool
    reason: str


def plan_paces(batches: Iterable[PacedBatch], policy: AtRiskPolicy, now: datetime) -> tuple[Pace, ...]:
    """Those that something is done about now, the ones with the least time first."""
    ordered = sorted(batches, key=lambda batch: (batch.expires_at, batch.id))
    return tuple(pace for batch in ordered if (pace := _pace(batch, policy, now)) is not None)


def _pace(batch: PacedBatch, policy: AtRiskPolicy, now: datetime) -> Pace | None:
    raises = policy is AtRiskPolicy.NEAR_REALTIME and batch.may_raise and not batch.is_raised
    if (batch.is_at_risk and not raises) or not batch.remaining or not _has_settled(batch, now):
        return None
    planned = batch.planned_rate(now)
    if batch.rate >= planned or now >= batch.expires_at:
        return None
    has_time = planned < float("inf")
    if not batch.rate and has_time:
        return None  # nothing is known, and there is time to learn it
    wanted = f"{planned:.3g} lines a second are needed" if has_time else "less than a tenth of its time is left"
    reason = f"{wanted} and {batch.rate:.3g} are answered; {batch.remaining} lines are left"
    return Pace(batch.id, raises, reason)


def _has_settled(batch: PacedBatch, now: datetime) -> bool:
    over_s, window_s = (now - batch.began_at).total_seconds(), (batch.expires_at - batch.began_at).total_seconds()
    return over_s >= min(SETTLES_S, SETTLES_SHARE * window_s)
