"""The rules by which a request finds its cell, as HAProxy and its peers have them. Pure: load in, a cell or none out.

None means that the request waits in one queue for the first cell that has a place."""

import hashlib
import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from bench.traffic.arrivals import Arrival
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters
from engine_agent.engines.sim.batching import Sequence as Generation

POINTS_PER_CELL = 160
"""On the ring: HAProxy places 16 for each unit of weight; ketama's usual number spreads keys within about 10 %."""


@dataclass(frozen=True)
class CellLoad:
    """What an ingress knows of a cell: its requests there, how many may be, and how many wait for this cell alone."""

    in_flight: int
    most: int
    queued: int = 0
    found_tokens: int = 0
    """Of this request's prompt, in the cell's cache; only for rules that read it."""

    @property
    def has_place(self) -> bool:
        return self.in_flight < self.most


class Router(Protocol):
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
class HashRing:
    """Consistent hashing: a key's cells in the order of its ring."""

    _ring: list[tuple[int, int]] = field(default_factory=list)

    def cells_of(self, key: str, count: int) -> list[int]:
        if not self._ring:
            names = ((f"cell-{cell}:{point}", cell) for cell in range(count) for point in range(POINTS_PER_CELL))
            self._ring = sorted((_hash_position(name), cell) for name, cell in names)
        start = bisect_right(self._ring, (_hash_position(key), count))
        return list(dict.fromkeys(cell for _, cell in (*self._ring[start:], *self._ring[:start])))


@dataclass
class BoundedHash:
    """Consistent hashing with bounded loads (Mirrokni et al. 2018): the key's first cell that is not overloaded.

    Overloaded is beyond `load_bound` times the mean (0: no bound), unless at most `light_share` of its places are in
    use. A full cell is passed over, and who finds none waits for the first place. `own_queues`: full cells are not
    passed over, who comes waits there, as with HAProxy's `balance hash` and `hash-balance-factor`."""

    load_bound: float
    light_share: float = 0.0
    own_queues: bool = False
    ring: HashRing = field(default_factory=HashRing)

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None:
        mean = (sum(load.in_flight for load in loads) + 1) / len(loads)
        bound = math.ceil(mean * self.load_bound) if self.load_bound else math.inf
        for cell in self.ring.cells_of(key, len(loads)):
            load = loads[cell]
            below = load.in_flight < max(bound, math.ceil(self.light_share * load.most))
            if below and (self.own_queues or load.has_place):
                return cell
        return None


@dataclass
class TwoChoices:
    """The less loaded of the key's first two cells on the ring; the least loaded of all while both are full."""

    ring: HashRing = field(default_factory=HashRing)
    _least: LeastOutstanding = field(default_factory=lambda: LeastOutstanding(with_queue=True))

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None:
        choices = self.ring.cells_of(key, len(loads))[:2]
        best = min(choices, key=lambda cell: loads[cell].in_flight)
        return best if loads[best].has_place else self._least.choose(key, loads)


@dataclass
class Sticky:
    """A new key goes to the least loaded cell and stays there while that cell is not full and within the bound.

    HAProxy does this with stick tables. A full cell, or a load above `load_bound` times the mean (0: no bound), moves
    the key permanently."""

    load_bound: float
    _homes: dict[str, int] = field(default_factory=dict)
    _least: LeastOutstanding = field(default_factory=lambda: LeastOutstanding(with_queue=True))

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None:
        home = self._homes.get(key)
        if home is None or not self._may_take(loads[home], loads):
            home = self._least.choose(key, loads)
            if home is not None:
                self._homes[key] = home
        return home

    def _may_take(self, load: CellLoad, loads: Sequence[CellLoad]) -> bool:
        mean = (sum(each.in_flight for each in loads) + 1) / len(loads)
        return load.has_place and (not self.load_bound or load.in_flight < math.ceil(self.load_bound * mean))


@dataclass
class Exact(Sticky):
    """The cell for which most of the prompt need not be read, as engines' cache events say it, less `load_tokens` for
    each request there: who has much of it and is busy is worth less than who has less and is idle. Where no cell has
    `worth_tokens` of it, the key's sticky cell, else the least loaded.

    A cell beyond the bound, or full, is passed over; one that is lightly loaded is not beyond it."""

    light_share: float = 0.25
    worth_tokens: int = 512
    load_tokens: int = 2000
    reads_caches: ClassVar[bool] = True

    def choose(self, key: str, loads: Sequence[CellLoad]) -> int | None:
        home = self._homes.get(key)
        fit = [cell for cell, load in enumerate(loads) if self._fits(load, loads)]
        if not fit:
            return super().choose(key, loads)
        if max(loads[cell].found_tokens for cell in fit) >= self.worth_tokens:
            best = min(fit, key=lambda cell: (self._cost(loads[cell]), cell != home))
        else:
            best = home if home in fit else min(fit, key=lambda cell: loads[cell].in_flight)
        self._homes[key] = best
        return best

    def _cost(self, load: CellLoad) -> int:
        return load.in_flight * self.load_tokens - load.found_tokens

    def _fits(self, load: CellLoad, loads: Sequence[CellLoad]) -> bool:
        return load.has_place and (load.in_flight < self.light_share * load.most or self._may_take(load, loads))


def _hash_position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@dataclass
class Outcome:
    """What became of one request; times in seconds. Not finished: `ended_s` is 0."""

    arrival: Arrival
    cell: int = -1
    first_token_s: float = 0.0
    ended_s: float = 0.0
    found_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s


@dataclass
class _Cell:
    model: BatchingModel
    slow_factor: float
    most: int
    in_flight: int = 0
    stepping: bool = False
    queue: deque[int] = field(default_factory=deque)

    def load(self, found_tokens: int = 0) -> CellLoad:
        return CellLoad(self.in_flight, self.most, len(self.queue), found_tokens)


@dataclass
class Simulation:
    """Cells with the same parameters, each `slow_factors[i]` times as slow; `most` concurrent requests in each."""

    router: Router
    parameters: ModelParameters
    slow_factors: Sequence[float]
    most: int

    def __post_init__(self) -> None:
        self._cells = [_Cell(BatchingModel(self.parameters), factor, self.most) for factor in self.slow_factors]
        self._waiting: deque[int] = deque()
        self._events: list[tuple[float, int, int]] = []
        self.outcomes: list[Outcome] = []

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        self.outcomes = [Outcome(arrival) for arrival in arrivals]
        coming = 0
        while coming < len(arrivals) or self._events:
            if coming < len(arrivals) and (not self._events or arrivals[coming].at_s <= self._events[0][0]):
                self._arrive(coming, arrivals[coming])
                coming += 1
            else:
                now_s, _, cell = heapq.heappop(self._events)
                self._end_step(now_s, cell)
        return self.outcomes

    def _arrive(self, number: int, arrival: Arrival) -> None:
        reads_caches = getattr(self.router, "reads_caches", False)
        chosen = self.router.choose(
            arrival.key,
            [cell.load(cell.model.found_tokens(arrival.blocks) if reads_caches else 0) for cell in self._cells],
        )
        if chosen is None:
            self._waiting.append(number)
        elif self._cells[chosen].in_flight < self._cells[chosen].most:
            self._send(number, chosen, arrival.at_s)
        else:
            self._cells[chosen].queue.append(number)

    def _send(self, number: int, index: int, now_s: float) -> None:
        cell, outcome = self._cells[index], self.outcomes[number]
        cell.in_flight += 1
        outcome.cell = index
        arrival = outcome.arrival
        cell.model.submit(Generation(str(number), arrival.prompt_tokens, arrival.output_tokens, blocks=arrival.blocks))
        if not cell.stepping:
            self._begin_step(index, now_s)

    def _begin_step(self, index: int, now_s: float) -> None:
        cell = self._cells[index]
        step = cell.model.begin_step(now_s, cell.slow_factor)
        cell.stepping = step is not None
        if step is not None:
            heapq.heappush(self._events, (step.ends_at_s, len(self._events), index))
            for name, found_tokens in step.admitted.items():
                self.outcomes[int(name)].found_tokens = found_tokens

    def _end_step(self, now_s: float, index: int) -> None:
        cell = self._cells[index]
        cell.stepping = False
        for token in cell.model.finish_step():
            outcome = self.outcomes[int(token.sequence)]
            if token.index == 0:
                outcome.first_token_s = now_s
            if token.is_last:
                outcome.ended_s = now_s
                cell.in_flight -= 1
        # All places first, then the step: who waited joins the batch that begins now.
        cell.stepping = True
        while cell.in_flight < cell.most and (cell.queue or self._waiting):
            self._send((cell.queue or self._waiting).popleft(), index, now_s)
        self._begin_step(index, now_s)


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    return sum(o.found_tokens for o in outcomes) / sum(o.arrival.prompt_tokens for o in outcomes)
