"""Many cells on virtual time: the simulator engine's own time model behind a routing rule. Deterministic and pure.

It leaves out the network and the proxies, which cost a millisecond where a step costs tens. Everything else is the same
code that a `sim` cell runs.
"""

import heapq
from collections import deque
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from bench.traffic.arrivals import Arrival
from bench.traffic.routers import CellLoad, Router
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence


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
    """Cells with the same parameters, each `slow_factors[i]` times as slow; `most` requests at once in each."""

    router: Router
    parameters: ModelParameters
    slow_factors: Sequence_[float]
    most: int

    def __post_init__(self) -> None:
        self._cells = [_Cell(BatchingModel(self.parameters), factor, self.most) for factor in self.slow_factors]
        self._waiting: deque[int] = deque()
        self._events: list[tuple[float, int, int]] = []
        self.outcomes: list[Outcome] = []

    def run(self, arrivals: Sequence_[Arrival]) -> list[Outcome]:
        """Serve them all, to the last token."""
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
        cell.model.submit(Sequence(str(number), arrival.prompt_tokens, arrival.output_tokens, blocks=arrival.blocks))
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


def hit_rate(outcomes: Sequence_[Outcome]) -> float:
    """Share of the prompt tokens that were found in a cache."""
    return sum(o.found_tokens for o in outcomes) / sum(o.arrival.prompt_tokens for o in outcomes)
