"""How many lines of batches may be under way at once to one model in one region, and how fast they are answered. Pure:
time is given.

Each cell has a window sized by the latency of its real-time requests (`engine_agent.cell_proxy.batch_window`), and
reports it. Their sum bounds what is sent. Below that a window starts at one line and doubles a round until it is
refused (slow start), then grows by one a round and shrinks by a quarter when it is refused again (additive increase,
multiplicative decrease; RFC 5681): other processes and regions send to the same cells, and reports are seconds old.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_agent.protocol.messages import BatchLoad
from traffic.planning.async_request import MOVED, AttemptResponse

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
