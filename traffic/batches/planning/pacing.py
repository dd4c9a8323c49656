"""Decides what to do about batches that will miss their deadline, keeps samples of their progress, and sizes the window
of lines in flight. Pure.

A batch is at risk if its rate is below the planned one, which leaves a tenth of the window as reserve. The steps are:
send as near-real-time, ask the plan of the day for cells, notify the owner. The deployment's policy limits them. Each
step happens once and gets time to help before the next, unless the reserve is used up.

Samples lie on a grid from the start of the batch's work. When the grid is full, every second sample is dropped and the
step doubles.

Cells report a window for batch requests, sized by the latency of their real-time requests
(`engine_agent.cell_proxy.batch_window`); their sum limits a model in a region. Below it, each sender's window starts at
one line, doubles per round until a refusal (slow start), then grows by one per round and shrinks by a quarter per
refusal (additive increase, multiplicative decrease; RFC 5681), because other senders share the cells and reports are
seconds old."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.load_messages import BatchLoad
from traffic.async_requests.planner import MOVED, AttemptResponse

RESERVE = 0.1
"""Share of the whole window that must remain."""
SETTLES_S, SETTLES_SHARE = 600.0, 0.1
"""A rate is meaningful after this time or share of the window: windows start slowly, and tenants take turns."""


class AtRiskPolicy(StrEnum):
    """Tell: notify the owner. Near-real-time: first send it as that. Cells: also ask the plan of the day for cells."""

    TELL = "tell"
    NEAR_REALTIME = "near_realtime"
    CELLS = "cells"


class PaceStep(StrEnum):
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
    """A batch in progress. `began_at` is the start of its run; `rate` is lines per second since `since`, the last step
    or `began_at`, or its model's rate if it has none yet, 0 if unknown. `may_raise`: whether its key may send
    near-real-time requests. `taken` are the past steps; `done` the answered lines."""

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
        allowed = (step for step in STEPS[self.policy] if self.may_raise or step is not PaceStep.RAISE)
        return tuple(step for step in allowed if step not in self.taken)

    def planned_rate(self, now: datetime) -> float:
        """Returns the lines per second needed from now on; infinite if the reserve is used up."""
        left_s = (self.expires_at - self.reserve - now).total_seconds()
        return self.remaining / left_s if left_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps to take for one batch, and its answered lines at that time."""

    batch: str
    steps: tuple[PaceStep, ...]
    reason: str
    done: int = 0


def plan_paces(batches: Iterable[PacedBatch], now: datetime) -> tuple[Pace, ...]:
    """Returns batches that need a step, least time first."""
    ordered = sorted(batches, key=lambda batch: (batch.expires_at, batch.id))
    return tuple(pace for batch in ordered if (pace := _batch_pace(batch, now)) is not None)


def _batch_pace(batch: PacedBatch, now: datetime) -> Pace | None:
    """One step at a time. Once the reserve is used up, no step has time to help, so all remaining ones are taken."""
    steps, planned = batch.next_steps, batch.planned_rate(now)
    has_time = planned < float("inf")
    if not steps or not batch.remaining or now >= batch.expires_at or (has_time and not _has_settled(batch, now)):
        return None
    if batch.rate >= planned:
        return None
    if not batch.rate and has_time and not batch.taken:
        return None  # the rate is unknown, and there is time to measure it
    wanted = f"{planned:.3g} lines a second are needed" if has_time else "less than a tenth of its time remains"
    reason = f"{wanted} and {batch.rate:.3g} are answered; {batch.remaining} lines are left"
    return Pace(batch.id, steps[:1] if has_time else steps, reason, batch.done)


def _has_settled(batch: PacedBatch, now: datetime) -> bool:
    over_s = (now - (batch.since or batch.began_at)).total_seconds()
    window_s = (batch.expires_at - batch.began_at).total_seconds()
    return over_s >= min(SETTLES_S, SETTLES_SHARE * window_s)


FIRST_STEP_S = 30
MOST_SAMPLES = 120
Counts = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Completed and failed lines in intervals of `step_s` seconds; None marks a missing sample."""

    step_s: int = FIRST_STEP_S
    completed: Counts = ()
    failed: Counts = ()

    @property
    def done(self) -> Counts:
        return tuple(
            None if one is None or other is None else one + other
            for one, other in zip(self.completed, self.failed, strict=True)
        )


def add_sample(timeline: Timeline, at_s: float, completed: int, failed: int) -> Timeline | None:
    """Adds a sample at `at_s` seconds of its work. Returns None if this step has a sample."""
    step_s, counts = timeline.step_s, (timeline.completed, timeline.failed)
    while at_s // step_s >= MOST_SAMPLES:
        step_s, counts = step_s * 2, (counts[0][::2], counts[1][::2])
    place = int(max(0.0, at_s) // step_s)
    if place < len(counts[0]):
        return None
    gap: Counts = (None,) * (place - len(counts[0]))
    return Timeline(step_s, (*counts[0], *gap, completed), (*counts[1], *gap, failed))


def needed_lines(timeline: Timeline, lines: int, window_s: float) -> tuple[float, ...]:
    """Returns the lines needed at each sample for a constant rate that leaves a tenth of the window."""
    span_s = max(1.0, window_s * (1 - RESERVE))
    return tuple(min(1.0, number * timeline.step_s / span_s) * lines for number in range(len(timeline.completed)))


def actual_rates(timeline: Timeline) -> tuple[float | None, ...]:
    """Returns lines per second since the previous sample; None at the first or at a missing one."""
    rates: list[float | None] = []
    last: tuple[int, int] | None = None
    for place, done in enumerate(timeline.done):
        rates.append(None if done is None or last is None else _lines_per_s(last, (place, done), timeline.step_s))
        last = last if done is None else (place, done)
    return tuple(rates)


def needed_rates(timeline: Timeline, lines: int, window_s: float) -> tuple[float | None, ...]:
    """Returns the lines per second needed from each sample on; None without a sample or after the deadline."""
    ends_s = window_s * (1 - RESERVE)
    return tuple(
        None
        if done is None or place * timeline.step_s >= ends_s
        else (lines - done) / (ends_s - place * timeline.step_s)
        for place, done in enumerate(timeline.done)
    )


def _lines_per_s(before: Sequence[int], now: Sequence[int], step_s: int) -> float:
    return max(0, now[1] - before[1]) / ((now[0] - before[0]) * step_s)


BUSY = frozenset({429, 503})
SHRINK = 0.75
MOST_PER_CELL = 48
"""For a cell that reports no window or does not apply it. A cell gains little from more, since most of its steps are
full."""
WAITING_PER_CELL = 2
"""A cell queues as many lines in addition to its window: `batch_window.WAITING`."""
LOOK_EVERY_S = 10.0


def lines_at_once(cells: Iterable[BatchLoad | None]) -> int:
    """Returns the lines that these ready cells can take together, at least one. None if a cell reports no window."""
    rooms = (
        MOST_PER_CELL if each is None or each.is_alone else min(MOST_PER_CELL, each.window + WAITING_PER_CELL)
        for each in cells
    )
    return max(1, sum(rooms))


@dataclass(slots=True)
class BatchWindow:
    """Window of one target: up to `size` lines in flight, and at most what its cells can take."""

    most: int = MOST_PER_CELL
    size: float = 1.0
    sending: int = 0
    has_met_resistance: bool = False
    _deaf: int = 0
    """Number of next results to ignore: lines in flight when the window shrank, less one."""
    _ended_at_s: float | None = None
    rate: float = 0.0
    """Recently answered lines per second."""

    @property
    def room(self) -> int:
        return max(0, int(min(self.size, self.most)) - self.sending)

    def began(self) -> None:
        self.sending += 1

    def ended(self, received: AttemptResponse, now_s: float) -> None:
        self.sending -= 1
        self._deaf = max(0, self._deaf - 1)
        if received.status in BUSY:
            self._shrink_window()
        elif received.status is not None and received.status < MOVED:
            grown = 1.0 if not self.has_met_resistance else 1.0 / self.size
            self.size = max(1.0, min(float(self.most), self.size + grown))
            self._count_answer(now_s)

    def _shrink_window(self) -> None:
        self.has_met_resistance = True
        if self._deaf == 0:
            self.size = max(1.0, self.size * SHRINK)
            self._deaf = self.sending + 1

    def _count_answer(self, now_s: float) -> None:
        """An average over about the last fifty lines."""
        if self._ended_at_s is not None:
            since_s = max(now_s - self._ended_at_s, 1e-3)
            interval_s = (1.0 / self.rate if self.rate else since_s) * 0.98 + since_s * 0.02
            self.rate = 1.0 / interval_s
        self._ended_at_s = now_s
