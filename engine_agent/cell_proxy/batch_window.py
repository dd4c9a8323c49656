"""How much batch work a cell has beside its real-time requests. Pure: time is given, and somebody else acts.

Two rules. Where the engine has no order of classes, only one batch prompt is before its first token, so that a
real-time prompt finds at most one before it. And batch requests in the engine have a window, which follows what the
cell's own real-time requests feel: it grows while their 95th percentiles are near those without batch work, and shrinks
by a quarter when they are not. A budget in milliseconds would starve batch work in slow cells, and hurt users of fast
ones.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

STEER_EVERY_S = 10
"""Each step measures what happened since the one before, and nothing older."""
FIRST = 8
"""With one prompt read at a time, or few tokens of them in a step, so many cannot come at once."""
SHRINK, GROW, GROW_FIRST = 0.75, 1.25, 2.0
"""A window that is too small for what its cell can do costs more than one that is tried for ten seconds; until it meets
resistance it doubles (slow start)."""
TTFT_FACTOR, TTFT_SLACK_S = 1.4, 0.02
ITL_FACTOR, ITL_SLACK_S = 2.0, 0.15
"""Averages of 95th percentiles may be so much above the baseline. Where a few more tokens of each answer wait for a
prompt to be read, that of the time between tokens jumps from one step to the longest, without the mean changing."""
AVERAGES, JUDGED_AFTER = 0.3, 3
"""A percentile of ten seconds varies by half of itself from one ten seconds to the next, so it is averaged: how much of
a new one goes into the average, and how many it needs before it is judged, at first and after each shrinking."""
MIN_TTFTS, MIN_ITLS = 5, 50
"""Fewer samples say nothing about a 95th percentile."""
LEARNS, SINKS, RISES = 0.2, 0.05, 1.005
"""A step: how much of what is measured without batch work goes into the baseline; how much of what is below it with
batch work; and how the baseline rises else, by a third in ten minutes: a busier day is not batch work's doing."""
WAITING = 2
"""Batch requests that wait in the cell, so that the next prompt is there when one is read. Each takes a place at the
ingress that a real-time request could have."""


class BatchAdmission(StrEnum):
    """What becomes of a batch request."""

    BEGIN = "begin"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class RealtimeLatency:
    """95th percentiles of a cell's real-time requests since the last step, in seconds; None: too few samples."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class BatchWindow:
    """Of one cell: at most `most` batch requests in its engine, `size` of them now."""

    most: int
    size: float = FIRST
    baseline: RealtimeLatency = field(default_factory=RealtimeLatency)
    recent: RealtimeLatency = field(default_factory=RealtimeLatency)
    """Averages with batch work, since it began or the window shrank."""
    is_over_budget: bool = False
    _steps: int = 0
    _has_met_resistance: bool = False

    @property
    def limit(self) -> int:
        return max(1, min(self.most, math.floor(self.size)))

    def steer(self, measured: RealtimeLatency, *, had_batch: bool, was_full: bool) -> None:
        """One step. `had_batch`: there was batch work since the last one; `was_full`: more of it wanted in."""
        known = self.baseline
        self.baseline = RealtimeLatency(
            _learned(known.ttft_s, measured.ttft_s, had_batch), _learned(known.itl_s, measured.itl_s, had_batch)
        )
        if not had_batch:
            self.recent, self._steps, self.is_over_budget = RealtimeLatency(), 0, False
            return
        self._steps += 1
        self.recent = RealtimeLatency(
            _averaged(self.recent.ttft_s, measured.ttft_s), _averaged(self.recent.itl_s, measured.itl_s)
        )
        self.is_over_budget = self._steps >= JUDGED_AFTER and (
            _is_over(self.recent.ttft_s, known.ttft_s, TTFT_FACTOR, TTFT_SLACK_S)
            or _is_over(self.recent.itl_s, known.itl_s, ITL_FACTOR, ITL_SLACK_S)
        )
        if self.is_over_budget:
            self.recent, self._steps, self._has_met_resistance = RealtimeLatency(), 0, True
            self.size = max(1.0, min(self.size, self.most) * SHRINK)
        elif was_full:
            self.size = min(float(self.most), self.size * (GROW if self._has_met_resistance else GROW_FIRST))


def _averaged(known_s: float | None, measured_s: float | None) -> float | None:
    if measured_s is None or known_s is None:
        return known_s if measured_s is None else measured_s
    return known_s + (measured_s - known_s) * AVERAGES


def _is_over(measured_s: float | None, known_s: float | None, factor: float, slack_s: float) -> bool:
    return measured_s is not None and known_s is not None and measured_s > known_s * factor + slack_s


def _learned(known_s: float | None, measured_s: float | None, had_batch: bool) -> float | None:
    if measured_s is None or known_s is None:
        return known_s if measured_s is None else measured_s
    if not had_batch:
        return known_s + (measured_s - known_s) * LEARNS
    return min(measured_s, known_s * RISES) if measured_s >= known_s else known_s + (measured_s - known_s) * SINKS


def decide_batch(*, running: int, unread: int, waiting: int, limit: int | None) -> BatchAdmission:
    """Whether one more batch request begins, by those that run in the engine, of these the ones before their first
    token, and those that wait in the cell. `limit` None: nobody more urgent uses the cell."""
    if waiting == 0 and unread == 0 and (limit is None or running < limit):
        return BatchAdmission.BEGIN
    return BatchAdmission.WAIT if waiting < WAITING else BatchAdmission.REFUSE
