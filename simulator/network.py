"""Simulated lines: messages take time, come twice, overtake each other, and get lost. It never looks into a message."""

from dataclasses import dataclass
from random import Random

from simulator.clock import Action, EventQueue


@dataclass(frozen=True, slots=True)
class NetworkQuality:
    """Seconds, and shares of all messages. `slow_s`: the most that a message may be held up, so that later ones
    overtake it."""

    latency_s: float = 0.02
    slow_s: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0


QUIET = NetworkQuality()
UNRULY = NetworkQuality(latency_s=0.05, slow_s=3.0, loss=0.05, duplicates=0.05)
"""Worse than any real network between two machines that still talk."""


class Network:
    """Carries messages as events. Counts what it does to them."""

    def __init__(self, queue: EventQueue, random: Random, quality: NetworkQuality) -> None:
        self.quality = quality
        self.sent = self.lost = self.repeated = 0
        self._queue = queue
        self._random = random

    def carry(self, deliver: Action) -> bool:
        """Deliver later, perhaps twice, perhaps never. Returns whether it was not lost."""
        self.sent += 1
        if self.quality.loss and self._random.random() < self.quality.loss:
            self.lost += 1
            return False
        self._queue.after(self._delay_s(), deliver)
        if self.quality.duplicates and self._random.random() < self.quality.duplicates:
            self.repeated += 1
            self._queue.after(self._delay_s(), deliver)
        return True

    def _delay_s(self) -> float:
        delay_s = self.quality.latency_s * (0.5 + self._random.random())
        if self.quality.slow_s and self._random.random() < 0.1:
            delay_s += self._random.random() * self.quality.slow_s
        return delay_s
