"""Goodput of four cells by how many of them only read prompts, on virtual time.

Cells are those of the default 70B model, with limits on the first token and between tokens. Prints a Markdown table in
about five CPU minutes; needs no quiet machine."""

import argparse
import heapq
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from time import process_time

from bench import percentile
from engine_agent.cell_proxy.prefill import Alone, Candidate, choose_cell
from engine_agent.engines.sim.batching import NO_HANDOVER, BatchingModel, Handover, ModelParameters
from engine_agent.engines.sim.batching import Sequence as Generation
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, PrefillCell

LAYOUT = "one"
MOST_WAITING = 400
"""So many requests before their first token: the load is above what the cells can do, and the point ends."""


@dataclass(frozen=True)
class Load:
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.output}"


@dataclass(frozen=True)
class Fleet:
    """How many cells of each kind. Prefill cells only read prompts, mixed ones do all, and so do decode ones where no
    prefill cell has room. Prompts from `from_tokens` on are handed over."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0
    chunk: int = ModelParameters().prefill_chunk_tokens
    from_tokens: int = PREFILL_FROM_TOKENS

    def __str__(self) -> str:
        if self.mixed:
            return f"{self.mixed} mixed, chunk {self.chunk}"
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class Point:
    """What requests felt at one rate, in seconds. `is_over`: the cells fell behind, and the rest was not run."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    handed_over: int = 0
    alone: int = 0
    is_over: bool = False

    def is_good(self, ttft_s: float, itl_s: float) -> bool:
        return not self.is_over and self.ttft_p99_s <= ttft_s and self.itl_p99_s <= itl_s


class _Kind(StrEnum):
    ARRIVAL = "arrival"
    STEP = "step"
    HANDED_OVER = "handed over"


@dataclass
class _Cell:
    number: int
    model: BatchingModel
    place: PrefillCell
    in_flight: int = 0
    is_stepping: bool = False


@dataclass
class _Request:
    due_s: float
    answered_by: _Cell
    last_s: float | None = None
    read_by: _Cell | None = None


@dataclass
class _World:
    fleet: Fleet
    load: Load
    handover: HandoverParameters
    seed: int
    events: list[tuple[float, int, _Kind, int]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)
    requests: list[_Request] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    waiting: int = 0
    handed_over: int = 0
    alone: int = 0

    def __post_init__(self) -> None:
        count = self.fleet.mixed + self.fleet.prefill + self.fleet.decode
        parameters = [ModelParameters(seed=self.seed + n, prefill_chunk_tokens=self.fleet.chunk) for n in range(count)]
        self.cells = [
            _Cell(n, BatchingModel(each), PrefillCell(f"c-{n}", 1, "n", "h", 1, 2, LAYOUT, each.max_num_seqs))
            for n, each in enumerate(parameters)
        ]
        self.prefill, self.answering = self.cells[: self.fleet.prefill], self.cells[self.fleet.prefill :]

    def add(self, at_s: float, kind: _Kind, number: int) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), kind, number))

    def arrive(self, now_s: float) -> None:
        answering = min(self.answering, key=lambda cell: (cell.in_flight, cell.number))
        answering.in_flight += 1
        self.waiting += 1
        request = _Request(now_s, answering)
        self.requests.append(request)
        number = len(self.requests) - 1
        reads = self._reads()
        if reads is None:
            self.alone += bool(self.prefill)
            self._submit(answering, now_s, number, self.load.output, NO_HANDOVER)
            return
        request.read_by = reads
        reads.in_flight += 1
        self._submit(reads, now_s, number, 1, Handover(is_kept=True))

    def _reads(self) -> _Cell | None:
        if self.load.prompt < self.fleet.from_tokens:
            return None
        chosen = choose_cell([Candidate(cell.place, cell.in_flight) for cell in self.prefill], LAYOUT)
        return None if isinstance(chosen, Alone) else next(cell for cell in self.prefill if cell.place == chosen)

    def _submit(self, cell: _Cell, now_s: float, number: int, output: int, handover: Handover) -> None:
        cell.model.submit(Generation(str(number), self.load.prompt, output, handover=handover))
        self._step(cell, now_s)

    def _step(self, cell: _Cell, now_s: float) -> None:
        if cell.is_stepping:
            return
        step = cell.model.begin_step(now_s)
        if step is not None:
            cell.is_stepping = True
            self.add(step.ends_at_s, _Kind.STEP, cell.number)

    def finish_step(self, cell: _Cell, now_s: float) -> None:
        cell.is_stepping = False
        for token in cell.model.finish_step():
            request = self.requests[int(token.sequence)]
            if request.read_by is cell:
                self.handed_over += 1
                self.add(now_s + self.handover.handover_s(self.load.prompt), _Kind.HANDED_OVER, int(token.sequence))
                continue
            if request.last_s is None:
                self.waiting -= 1
                self.ttfts.append(now_s - request.due_s)
            else:
                self.gaps.append(now_s - request.last_s)
            request.last_s = now_s
            cell.in_flight -= token.is_last
        self._step(cell, now_s)

    def take_over(self, number: int, now_s: float) -> None:
        request = self.requests[number]
        reads = request.read_by
        if reads is not None:
            reads.in_flight -= 1
            reads.model.forget(str(number))
            self._step(reads, now_s)
        self._submit(request.answered_by, now_s, number, self.load.output, Handover(self.load.prompt))


def measure(fleet: Fleet, load: Load, rate: float, requests: int, seed: int = 0) -> Point:
    world, chance, at_s = _World(fleet, load, HandoverParameters(), seed), random.Random(seed), 0.0
    for number in range(requests):
        at_s += chance.expovariate(rate)
        world.add(at_s, _Kind.ARRIVAL, number)
    while world.events and world.waiting < MOST_WAITING:
        now_s, _, kind, number = heapq.heappop(world.events)
        match kind:
            case _Kind.ARRIVAL:
                world.arrive(now_s)
            case _Kind.STEP:
                world.finish_step(world.cells[number], now_s)
            case _Kind.HANDED_OVER:
                world.take_over(number, now_s)
    ttfts, gaps = world.ttfts or [0.0], world.gaps or [0.0]
    return Point(
        percentile(ttfts, 0.5), percentile(ttfts, 0.99), percentile(gaps, 0.5), percentile(gaps, 0.99),
        world.handed_over, world.alone, is_over=world.waiting >= MOST_WAITING,
    )  # fmt: skip


def goodput(fleet: Fleet, load: Load, ttft_s: float, itl_s: float, requests: int, seed: int = 0) -> float:
    """Returns the requests per second up to which both limits hold, to 2 %. Returns 0 if they hold at none.

    The highest rate tried sends all `requests` within a second or two. Few enough requests stay within the limits even
    if they arrive together, so without this bound the search would not end."""
    low, high = 0.0, 0.25
    while high <= requests and measure(fleet, load, high, requests, seed).is_good(ttft_s, itl_s):
        low, high = high, high * 2
    while high - low > 0.02 * high and high > 0.05:
        middle = (low + high) / 2
        if measure(fleet, load, middle, requests, seed).is_good(ttft_s, itl_s):
            low = middle
        else:
            high = middle
    return low


FLEETS = (
    Fleet(mixed=4),
    Fleet(mixed=4, chunk=512),
    Fleet(prefill=1, decode=3),
    Fleet(prefill=2, decode=2),
    Fleet(prefill=3, decode=1),
)
LOADS = ((Load(3000, 200), 2.6), (Load(1000, 150), 6.0), (Load(3000, 50), 3.0))
"""And a rate at which all are shown."""
TTFT_S, ITL_S, NO_LIMIT_S = 1.5, 0.05, 10.0


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1500, help="of one point")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| load | cells | TTFT p50 / p99 ms | ITL p50 / p99 ms | goodput/s | beside mixed | with TTFT alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for load, rate in LOADS:
        base = 0.0
        for fleet in FLEETS:
            point = measure(fleet, load, rate, options.requests, options.seed)
            good = goodput(fleet, load, TTFT_S, ITL_S, options.requests, options.seed)
            first = goodput(fleet, load, TTFT_S, NO_LIMIT_S, options.requests, options.seed)
            base = base or good
            beside = f"{good / base:.2f}" if base else "-"
            print(
                f"| {load} at {rate:g}/s | {fleet} | {point.ttft_p50_s * 1000:.0f} / {point.ttft_p99_s * 1000:.0f}"
                f" | {point.itl_p50_s * 1000:.0f} / {point.itl_p99_s * 1000:.0f}"
                f" | {good:.2f} | {beside} | {first:.2f} |",
                flush=True,
            )
    print(f"\n{process_time():.0f} s of a processor; load average {os.getloadavg()[0]:.1f}")
