"""Several ingresses in front of the same cells, on virtual time: each has HAProxy's rules, its own queue and its own
view of the cells. It measures nothing.

HAProxy 2.8's `leastconn` compares (own requests + 1) / weight, and 0 for a server without own requests. A full server
is passed over; a request that finds none waits in the ingress's queue for the first place."""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.traffic.arrivals import Arrival
from bench.traffic.routers import Outcome
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters
from engine_agent.engines.sim.batching import Sequence as Generation
from engine_agent.ingress.steering import SeenCell, Steered, steer

WEIGHT = 100


@dataclass
class _Cell:
    model: BatchingModel
    slow_factor: float
    in_flight: int = 0
    stepping: bool = False


@dataclass
class _Ingress:
    place: int
    own: list[int]
    steered: dict[int, Steered]
    queue: deque[int] = field(default_factory=deque)
    turn: int = 0
    reports: int = 0

    def choose(self) -> int | None:
        self.turn += 1
        cells = [(self.turn + offset) % len(self.own) for offset in range(len(self.own))]
        open_ones = [cell for cell in cells if self.own[cell] < self.steered[cell].limit]
        return min(open_ones, key=self._key) if open_ones else None

    def _key(self, cell: int) -> float:
        return (self.own[cell] + 1) / self.steered[cell].weight if self.own[cell] else 0.0


class RegionSimulation:
    """`ingresses` share cells of `places` each, `slow_factors[i]` times as slow. Every ingress gets a report of each
    cell every `every_s`; 0: none. `shares`: of the arrivals, by ingress; equal if empty."""

    def __init__(
        self,
        ingresses: int,
        parameters: ModelParameters,
        slow_factors: Sequence[float],
        places: int,
        *,
        every_s: float = 0.0,
        shares: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        self._cells = [_Cell(BatchingModel(parameters), factor) for factor in slow_factors]
        table = dict.fromkeys(range(len(slow_factors)), Steered(WEIGHT, places))
        self._ingresses = [_Ingress(place, [0] * len(slow_factors), dict(table)) for place in range(ingresses)]
        self._places, self._every_s = places, every_s
        self._shares = list(shares) or [1.0] * ingresses
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, str, int]] = []
        self._numbers = 0
        self._unfinished = 0
        self._at: list[_Ingress] = []
        self.outcomes: list[Outcome] = []
        self.most_in_flight = 0

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        self.outcomes = [Outcome(arrival) for arrival in arrivals]
        self._at = self._chance.choices(self._ingresses, self._shares, k=len(arrivals))
        self._unfinished = len(arrivals)
        for number, arrival in enumerate(arrivals):
            self._later(arrival.at_s, "arrival", number)
        if self._every_s:
            for ingress in self._ingresses:
                self._later(self._chance.random() * self._every_s, "report", ingress.place)
        while self._unfinished:
            now_s, _, kind, which = heapq.heappop(self._events)
            if kind == "arrival":
                self._at[which].queue.append(which)
                self._serve_queue(self._at[which], now_s)
            elif kind == "report":
                self._read_reports(self._ingresses[which], now_s)
            else:
                self._end_step(which, now_s)
        return self.outcomes

    def _later(self, at_s: float, kind: str, which: int) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_s, self._numbers, kind, which))

    def _read_reports(self, ingress: _Ingress, now_s: float) -> None:
        ingress.reports += 1
        seen = {
            number: SeenCell(self._places, WEIGHT, ingress.own[number], cell.in_flight, turn=ingress.reports)
            for number, cell in enumerate(self._cells)
        }
        ingress.steered = steer(seen, ingress.steered, ingresses=len(self._ingresses), place=ingress.place)
        self._serve_queue(ingress, now_s)
        self._later(now_s + self._every_s, "report", ingress.place)

    def _serve_queue(self, ingress: _Ingress, now_s: float) -> None:
        while ingress.queue and (cell := ingress.choose()) is not None:
            self._send(ingress, ingress.queue.popleft(), cell, now_s)

    def _send(self, ingress: _Ingress, number: int, index: int, now_s: float) -> None:
        cell, outcome = self._cells[index], self.outcomes[number]
        ingress.own[index] += 1
        cell.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, cell.in_flight)
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
            self._later(step.ends_at_s, "step", index)

    def _end_step(self, index: int, now_s: float) -> None:
        cell = self._cells[index]
        cell.stepping = False
        freed: dict[int, _Ingress] = {}
        for token in cell.model.finish_step():
            number = int(token.sequence)
            outcome, ingress = self.outcomes[number], self._at[number]
            if token.index == 0:
                outcome.first_token_s = now_s
            if token.is_last:
                outcome.ended_s = now_s
                cell.in_flight -= 1
                ingress.own[index] -= 1
                self._unfinished -= 1
                freed[ingress.place] = ingress
        # All places first, then the step: a request that waited joins the batch that begins now.
        cell.stepping = True
        for ingress in freed.values():
            while ingress.queue and ingress.own[index] < ingress.steered[index].limit:
                self._send(ingress, ingress.queue.popleft(), index, now_s)
        self._begin_step(index, now_s)
