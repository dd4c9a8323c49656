"""How many lines of batches may be under way at once to one model in one region, and how fast they are answered. Pure:
time is given.

A window starts at one line and doubles a round until it meets resistance (slow start), because a cell that is handed
many prompts at once reads them all before it answers anybody. Then it grows by one a round and shrinks by a quarter
when somebody says that there is too much (additive increase, multiplicative decrease; RFC 5681).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from traffic.planning.async_request import MOVED, AttemptResponse

BUSY = frozenset({429, 503})
SHRINK = 0.75
MOST_PER_CELL = 48
"""Above that a cell gains little from more: most of its steps are full. An estimate; `size` finds what is right."""
SLOWER, SLOWER_MS = 1.5, 50.0
"""Real-time first tokens may come so much later than without batch work, by both, before the window shrinks. The factor
is AIBrix's; the milliseconds keep noise of fast cells from counting."""
LEARNS, FORGETS = 0.2, 1.01
"""A step: how much of what is measured without batch work goes into the baseline, and how the baseline rises while
there is batch work, so that a busier day is not taken for its doing for ever: by half in seven minutes."""
STEER_EVERY_S = 10.0
"""Cells report medians of the last 30 s: what a step does is seen three steps later."""


@dataclass(frozen=True, slots=True)
class CellLatency:
    """What a cell's real-time requests waited for their first token, as a median in ms; None: there were none."""

    cell: str
    ttft_ms: float | None
    batch_in_flight: int


@dataclass(slots=True)
class BatchWindow:
    """Of one target. `sending` of at most `size`; `cells` is how many cells of it are ready."""

    cells: int = 1
    size: float = 1.0
    sending: int = 0
    has_met_resistance: bool = False
    _deaf: int = 0
    """So many ends, one less than what was under way when it shrank, say nothing new."""
    _ended_at_s: float | None = None
    rate: float = 0.0
    """Lines answered a second, as of late."""
    is_slowing: bool = False
    """Whether real-time requests of a cell wait longer than its baseline allows."""
    _baselines: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """How many more may be sent now."""
        return max(0, int(min(self.size, self.most)) - self.sending)

    @property
    def most(self) -> int:
        return MOST_PER_CELL * max(1, self.cells)

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
            if not self.is_slowing:
                self.size = min(float(self.most), self.size + grown)
            self._count(now_s)

    def steer(self, cells: Iterable[CellLatency]) -> None:
        """A step by what cells say of their real-time requests, each measured by its own baseline: an absolute budget
        would starve batches in slow cells, and hurt users of fast ones."""
        slower, there = False, set[str]()
        for each in cells:
            there.add(each.cell)
            if each.ttft_ms is not None:
                slower |= self._is_slower(each, each.ttft_ms)
        self.is_slowing = slower
        self._baselines = {cell: known for cell, known in self._baselines.items() if cell in there}
        if self.is_slowing:
            self.has_met_resistance = True
            self.size = max(1.0, self.size * SHRINK)

    def _is_slower(self, each: CellLatency, ttft_ms: float) -> bool:
        known = self._baselines.get(each.cell, ttft_ms)
        is_slower = each.batch_in_flight > 0 and ttft_ms > max(known * SLOWER, known + SLOWER_MS)
        learned = known + (ttft_ms - known) * LEARNS
        self._baselines[each.cell] = learned if each.batch_in_flight == 0 else min(known * FORGETS, max(ttft_ms, 1.0))
        return is_slower

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
