"""Which batch is worked on first: the one with the least slack, tenants in turns. And whether a new one can be done in
its time. Pure.

Slack is what is left until the deadline without the time that the remaining lines need at the rate that lines are
answered. A higher priority counts as less slack.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from traffic.planning.batch import USUAL_PRIORITY

PRIORITY_FACTOR = 1.5
"""A step of priority is worth a third of what time is left: it moves what has time, and never what has none."""
RESERVE = 0.9
"""Of a measured rate that is counted on."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """An open batch. `remaining` lines; `rate`: lines a second that its model answers, 0: not known yet."""

    id: str
    tenant: str
    remaining: int
    expires_at: datetime
    priority: int = USUAL_PRIORITY
    rate: float = 0.0

    def slack_s(self, now: datetime) -> float:
        work_s = self.remaining / self.rate if self.rate > 0 else 0.0
        return (self.expires_at - now).total_seconds() - work_s

    def urgency(self, now: datetime) -> float:
        """What is ordered by, the least first. Priority scales slack where there is some, and debt the other way."""
        slack_s = self.slack_s(now)
        factor = PRIORITY_FACTOR ** (USUAL_PRIORITY - self.priority)
        return slack_s * factor if slack_s >= 0 else slack_s / factor


def plan_order(jobs: Iterable[BatchJob], now: datetime) -> tuple[str, ...]:
    """Ids in the order in which they get what is free: the most urgent of each tenant, then the second of each."""
    turns: dict[str, int] = {}
    ranked = []
    for job in sorted(jobs, key=lambda job: (job.urgency(now), job.id)):
        turn = turns[job.tenant] = turns.get(job.tenant, -1) + 1
        ranked.append((turn, job.urgency(now), job.id))
    return tuple(id for _, _, id in sorted(ranked))


def feasible_s(lines: int, ahead: int, rate: float) -> float | None:
    """Seconds in which so many lines are done behind `ahead` others; None: nobody knows, for nothing was measured."""
    return (lines + ahead) / (rate * RESERVE) if rate > 0 else None


def window_text(seconds: float) -> str:
    """The shortest completion window that has so many seconds, as applications write it."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"


def deadline_refusal(
    *, asked_s: float, lines: int, ahead: int, rate: float, is_usual: bool, planned_s: float | None = None
) -> str | None:
    """Why a batch will not be done in the time that it asks for, and in which it would be; None: it may well be, nobody
    knows, or it is the usual time, which clients cannot choose. `planned_s`: in which it and those ahead have room by
    the plan of the day; None: there is none, and the rate of before counts."""
    needed_s = feasible_s(lines, ahead, rate) if planned_s is None else planned_s
    if needed_s is None or needed_s <= asked_s or is_usual:
        return None
    by = f"at {rate:.3g} lines a second" if planned_s is None else "in what is planned to be free"
    window = window_text(needed_s)
    return f"{lines} lines behind {ahead} others cannot be done in that time {by}; a window of {window} can be met"


def estimated_end(remaining: int, rate: float, now: datetime) -> datetime | None:
    """When the last line is answered at this rate."""
    return now + timedelta(seconds=remaining / rate) if rate > 0 else None
