"""Whether a batch will miss its deadline at the rate that it has, and what is done about it, step by step: what is left
of it is sent as near-real-time, the plan of the day is asked for cells, its owner is told. Pure.

The planned rate is what has to be answered a second so that a tenth of its window is left in the end. A batch below it
is at risk. The policy of its deployment says how far that may go; each step has its time to help before the next one,
unless there is none left. No step is taken twice: telling it again with each turn of its rate would help nobody.

How far a batch was over time, in a bounded number of samples: as many as a figure shows, whatever its window. Pure.

Samples are on a grid that begins with the batch's work; once it is full, every second one goes and the step doubles.

How many lines of batches may be under way at once to one model in one region, and how fast they are answered. Pure:
time is given.

Each cell has a window sized by the latency of its real-time requests (`engine_agent.cell_proxy.batch_window`), and
reports it. Their sum bounds what is sent. Below that a window starts at one line and doubles a round until it is
refused (slow start), then grows by one a round and shrinks by a quarter when it is refused again (additive increase,
multiplicative decrease; RFC 5681): other processes and regions send to the same cells, and reports are seconds old.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.messages import BatchLoad
from traffic.async_requests.planner import MOVED, AttemptResponse

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


FIRST_STEP_S = 30
MOST_SAMPLES = 120
Counts = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lines that had an answer and lines that failed, `step_s` seconds from one sample to the next; None: nobody looked
    then."""

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
    """With what there is `at_s` seconds after its work began; None: this step has its sample already."""
    step_s, counts = timeline.step_s, (timeline.completed, timeline.failed)
    while at_s // step_s >= MOST_SAMPLES:
        step_s, counts = step_s * 2, (counts[0][::2], counts[1][::2])
    place = int(max(0.0, at_s) // step_s)
    if place < len(counts[0]):
        return None
    gap: Counts = (None,) * (place - len(counts[0]))
    return Timeline(step_s, (*counts[0], *gap, completed), (*counts[1], *gap, failed))


def needed_lines(timeline: Timeline, lines: int, window_s: float) -> tuple[float, ...]:
    """Lines that would have an outcome at each sample, were it always as fast as it has to be so that a tenth of its
    window is left in the end."""
    span_s = max(1.0, window_s * (1 - RESERVE))
    return tuple(min(1.0, number * timeline.step_s / span_s) * lines for number in range(len(timeline.completed)))


def actual_rates(timeline: Timeline) -> tuple[float | None, ...]:
    """Lines a second since the sample before; None at the first, and where nobody looked."""
    rates: list[float | None] = []
    last: tuple[int, int] | None = None
    for place, done in enumerate(timeline.done):
        rates.append(None if done is None or last is None else _rate(last, (place, done), timeline.step_s))
        last = last if done is None else (place, done)
    return tuple(rates)


def needed_rates(timeline: Timeline, lines: int, window_s: float) -> tuple[float | None, ...]:
    """Lines a second that were needed from each sample on; None where none was taken, or its time was over."""
    ends_s = window_s * (1 - RESERVE)
    return tuple(
        None
        if done is None or place * timeline.step_s >= ends_s
        else (lines - done) / (ends_s - place * timeline.step_s)
        for place, done in enumerate(timeline.done)
    )


def _rate(before: Sequence[int], now: Sequence[int], step_s: int) -> float:
    return max(0, now[1] - before[1]) / ((now[0] - before[0]) * step_s)


BUSY = frozenset({429, 503})
SHRINK = 0.75
MOST_PER_CELL = 48
"""Of a cell that reports no window, or whose window is not in force. Above that a cell gains little from more: most of
its steps are full."""
WAITING_PER_CELL = 2
"""As many lines wait in a cell beside its window: `engine_agent.cell_proxy.batch_window.WAITING`."""
LOOK_EVERY_S = 10.0


def lines_at_once(cells: Iterable[BatchLoad | None]) -> int:
    """How many lines these ready cells can have together; at least one. None: a cell reports no window."""
    rooms = (
        MOST_PER_CELL if each is None or each.is_alone else min(MOST_PER_CELL, each.window + WAITING_PER_CELL)
        for each in cells
    )
    return max(1, sum(rooms))


@dataclass(slots=True)
class BatchWindow:
    """Of one target. `sending` of at most `size`, and of what its cells can have, `most`."""

    most: int = MOST_PER_CELL
    size: float = 1.0
    sending: int = 0
    has_met_resistance: bool = False
    _deaf: int = 0
    """So many ends, one less than what was under way when it shrank, say nothing new."""
    _ended_at_s: float | None = None
    rate: float = 0.0
    """Lines answered a second, as of late."""

    @property
    def room(self) -> int:
        """How many more may be sent now."""
        return max(0, int(min(self.size, self.most)) - self.sending)

    def began(self) -> None:
        self.sending += 1

    def ended(self, received: AttemptResponse, now_s: float) -> None:
        """One of those that were sent has ended."""
        self.sending -= 1
        self._deaf = max(0, self._deaf - 1)
        if received.status in BUSY:
            self._shrink()
        elif received.status is not None and received.status < MOVED:
            grown = 1.0 if not self.has_met_resistance else 1.0 / self.size
            self.size = max(1.0, min(float(self.most), self.size + grown))
            self._count(now_s)

    def _shrink(self) -> None:
        self.has_met_resistance = True
        if self._deaf == 0:
            self.size = max(1.0, self.size * SHRINK)
            self._deaf = self.sending + 1

    def _count(self, now_s: float) -> None:
        """An average that forgets within some fifty lines."""
        if self._ended_at_s is not None:
            since_s = max(now_s - self._ended_at_s, 1e-3)
            interval_s = (1.0 / self.rate if self.rate else since_s) * 0.98 + since_s * 0.02
            self.rate = 1.0 / interval_s
        self._ended_at_s = now_s
