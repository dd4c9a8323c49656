"""The rules by which a request finds its cell, as HAProxy and its peers have them. Pure: load in, a cell or none out.

None means that the request waits in one queue for the first cell that has a place.
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

POINTS_PER_CELL = 160
"""On the ring: HAProxy places 16 for each unit of weight; ketama's usual number spreads keys within about 10 %."""


@dataclass(frozen=True)
class CellLoad:
    """What an ingress knows of a cell: its requests there, how many may be, and how many wait for this cell alone."""

    in_flight: int
    most: int
    queued: int = 0

    @property
    def has_place(self) -> bool:
        return self.in_flight < self.most


class Router(Protocol):
    """Chooses a cell by its index for a request with this key."""

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None: ...


@dataclass
class RoundRobin:
    """In turn, whatever the load; who comes to a full cell waits there."""

    turn: int = 0

    def choose(self, _key: str, loads: Sequence[CellLoad]) -> int | None:
        self.turn += 1
        return self.turn % len(loads)


@dataclass
class RandomCell:
    """By chance; with `of` 2 the less loaded of two (Mitzenmacher's power of two choices)."""

    of: int = 1
    seed: int = 0
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def choose(self, _key: str, loads: Sequence[CellLoad]) -> int | None:
        drawn = self._chance.sample(range(len(loads)), self.of)
        return min(drawn, key=lambda cell: loads[cell].in_flight + loads[cell].queued)


@dataclass
class LeastOutstanding:
    """The fewest requests, ties in turn. `with_queue`: a full cell gets none, who comes waits for the first place."""

    with_queue: bool
    turn: int = 0

    def choose(self, _key: str, loads: Sequence[CellLoad]) -> int | None:
        self.turn += 1
        order = [(self.turn + offset) % len(loads) for offset in range(len(loads))]
        best = min(order, key=lambda cell: loads[cell].in_flight + loads[cell].queued)
        return best if loads[best].has_place or not self.with_queue else None


@dataclass
class BoundedHash:
    """Consistent hashing with bounded loads (Mirrokni et al. 2018), as HAProxy's `hash-balance-factor` has it.

    HAProxy bounds what runs and not what waits: a request for a full cell waits for that cell. With `shared_queue` keys
    count only while the bound keeps every cell below its limit; above that the least loaded cell with a place is taken,
    and who finds none waits for the first. `load_bound` 0: no bound at all.
    """

    load_bound: float
    shared_queue: bool
    _busy: LeastOutstanding = field(default_factory=lambda: LeastOutstanding(with_queue=True))
    _ring: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None:
        if self.shared_queue and self._slots(loads) > min(load.most for load in loads):
            return self._busy.choose(key, loads)
        return self._preferred(key, loads)

    def _slots(self, loads: Sequence[CellLoad]) -> float:
        """How many requests a cell may have: the bound times the mean, with the request that comes."""
        running = sum(load.in_flight for load in loads) + 1
        return math.ceil(running * self.load_bound / len(loads)) if self.load_bound else math.inf

    def _preferred(self, key: str, loads: Sequence[CellLoad]) -> int:
        if not self._ring:
            names = ((f"cell-{cell}:{point}", cell) for cell in range(len(loads)) for point in range(POINTS_PER_CELL))
            self._ring = sorted((_place(name), cell) for name, cell in names)
        slots = self._slots(loads)
        start = bisect_right(self._ring, (_place(key), len(loads)))
        for step in range(len(self._ring)):
            cell = self._ring[(start + step) % len(self._ring)][1]
            if loads[cell].in_flight < slots:
                return cell
        raise AssertionError("a bound above 1 leaves one cell below it")


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
