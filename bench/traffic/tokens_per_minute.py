"""Cells and proxy hosts for 3,000,000 tokens a minute in three regions, from recorded requests on virtual time.

Copies of the Azure conversation trace, each shifted by a random time, are added up until they carry the wanted tokens a
minute on average, which is the peak that the cells are sized for. Each region has the same cells, with the time model
of the `sim` engine's default 70B model. Its ingress sends a request to the cell with the fewest outstanding ones, or
lets it wait in one queue. A run has a warm-up that is not counted.

The number of cells is the least with which p99 of the time to first token is below the limit with all regions, for the
first seed. Then every seed runs with all regions, with the last region lost after the warm-up, and with so many cells
that the limit would hold without that region. The lost region's unanswered requests and its new ones go to the other
regions evenly. In the first `--failover` seconds each is held for that long: these requests are not part of p50 and
p99, and hardly one of them is good. An answer that the region had begun is broken, and is not good.

    .venv/bin/python -m bench tokens_per_minute --seeds 3
    .venv/bin/python -m bench tokens_per_minute --seeds 3 --count all

Hosts: CPU seconds of docs/bench/traffic.md times the rate, as printed. Cell proxies run on the cells' hosts."""

import argparse
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from bench import note, percentile, table
from bench.traffic.arrivals import Arrival, azure
from bench.traffic.proxy_hosts import add_cost_options, hosts_text
from bench.traffic.routers import LeastOutstanding, Outcome, Simulation
from engine_agent.engines.sim.batching import ModelParameters

TRACE_S = 3500.0
"""The trace is cut here, and repeats."""
MODEL = ModelParameters()


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens_per_minute` of answers, or of prompts and answers if `counts_prompts`."""

    tokens_per_minute: float
    counts_prompts: bool
    warm_up_s: float
    measured_s: float

    @property
    def until_s(self) -> float:
        return self.warm_up_s + self.measured_s

    def tokens(self, arrival: Arrival) -> int:
        return arrival.output_tokens + (arrival.prompt_tokens if self.counts_prompts else 0)

    def copies(self, trace: Sequence[Arrival]) -> float:
        """Returns how many times the trace's mean rate of tokens this is."""
        return self.tokens_per_minute / 60 / (sum(map(self.tokens, trace)) / TRACE_S)


def superposed(trace: Sequence[Arrival], load: Load, seed: int) -> list[Arrival]:
    """Returns the arrivals of the run: copies of the trace, each from another moment on. Of the last copy only a part,
    drawn at random, so that the mean is met."""
    chance = random.Random(seed)
    left = load.copies(trace)
    arrivals: list[Arrival] = []
    while left > 0:
        offset_s, share = chance.uniform(0, TRACE_S), min(1.0, left)
        for arrival in trace:
            at_s = (arrival.at_s - offset_s) % TRACE_S
            if at_s < load.until_s and (share == 1.0 or chance.random() < share):
                arrivals.append(replace(arrival, at_s=at_s))
        left -= 1.0
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def by_region(arrivals: Sequence[Arrival], regions: int, seed: int) -> list[list[Arrival]]:
    chance = random.Random(seed + 1)
    parts: list[list[Arrival]] = [[] for _ in range(regions)]
    for arrival in arrivals:
        parts[chance.randrange(regions)].append(arrival)
    return parts


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of the measured time. `ttft_s` counts from its first arrival, wherever it was answered. `is_held`: it
    was sent to a region that is lost, and answered elsewhere after the failover."""

    ttft_s: float
    tokens: int
    is_broken: bool = False
    is_held: bool = False


def serve(arrivals: Sequence[Arrival], cells: int) -> list[Outcome]:
    """One region: its ingress with one queue, and its cells."""
    router = LeastOutstanding(with_queue=True)
    return Simulation(router, MODEL, [1.0] * cells, MODEL.max_num_seqs).run(arrivals)


def all_regions(parts: Sequence[Sequence[Arrival]], cells: int, load: Load) -> list[Answer]:
    outcomes = (outcome for part in parts for outcome in serve(part, cells))
    return list(_answers(outcomes, load))


def one_lost(parts: Sequence[Sequence[Arrival]], cells: int, load: Load, failover_s: float) -> list[Answer]:
    """The last region is lost when the measured time begins."""
    lost_s = load.warm_up_s
    back_s = lost_s + failover_s
    begun, unanswered = list[Answer](), list[Arrival]()
    for outcome in serve([arrival for arrival in parts[-1] if arrival.at_s < lost_s], cells):
        if outcome.first_token_s >= lost_s:
            unanswered.append(outcome.arrival)
        elif outcome.ended_s >= lost_s:
            begun.append(Answer(outcome.ttft_s, 0, is_broken=True))
    unanswered += [arrival for arrival in parts[-1] if arrival.at_s >= lost_s]
    answers = begun
    others = parts[:-1]
    for number, part in enumerate(others):
        moved = unanswered[number :: len(others)]
        first = {f"moved-{index}": arrival.at_s for index, arrival in enumerate(moved)}
        again = [
            replace(arrival, at_s=again_at_s(arrival.at_s, lost_s, failover_s), key=f"moved-{index}")
            for index, arrival in enumerate(moved)
        ]
        for outcome in serve(sorted([*part, *again], key=lambda arrival: arrival.at_s), cells):
            asked_s = first.get(outcome.arrival.key, outcome.arrival.at_s)
            if asked_s >= lost_s or outcome.arrival.key in first:
                is_held = outcome.arrival.key in first and asked_s < back_s
                answers.append(Answer(outcome.first_token_s - asked_s, load.tokens(outcome.arrival), is_held=is_held))
    return answers


def again_at_s(at_s: float, lost_s: float, failover_s: float) -> float:
    """Returns when another region gets a request that arrived then: until the failover, its client tries again."""
    return at_s if at_s >= lost_s + failover_s else max(at_s, lost_s) + failover_s


def _answers(outcomes: Iterable[Outcome], load: Load) -> Iterable[Answer]:
    for outcome in outcomes:
        if outcome.arrival.at_s >= load.warm_up_s:
            yield Answer(outcome.ttft_s, load.tokens(outcome.arrival))


@dataclass(frozen=True, slots=True)
class Result:
    """`good`: share of requests whose first token came within the limit and whose answer was not broken.
    `tokens_per_minute`: of the good requests. p50 and p99 are of the others than broken and held ones."""

    p50_s: float
    p99_s: float
    good: float
    tokens_per_minute: float
    broken: int
    held: int
    requests: int


def result(answers: Sequence[Answer], load: Load, limit_s: float) -> Result:
    ttft_s = [answer.ttft_s for answer in answers if not answer.is_broken and not answer.is_held]
    good = [answer for answer in answers if not answer.is_broken and answer.ttft_s < limit_s]
    return Result(
        p50_s=percentile(ttft_s, 0.5),
        p99_s=percentile(ttft_s, 0.99),
        good=len(good) / len(answers),
        tokens_per_minute=sum(answer.tokens for answer in good) / load.measured_s * 60,
        broken=sum(answer.is_broken for answer in answers),
        held=sum(answer.is_held for answer in answers),
        requests=len(answers),
    )


def without_last(parts: Sequence[Sequence[Arrival]]) -> list[list[Arrival]]:
    """Returns the parts of the other regions with that of the last one, evenly, as long after its loss."""
    others = parts[:-1]
    moved = (parts[-1][number :: len(others)] for number in range(len(others)))
    both = zip(others, moved, strict=True)
    return [sorted([*part, *more], key=lambda arrival: arrival.at_s) for part, more in both]


def least_cells(parts: Sequence[Sequence[Arrival]], load: Load, limit_s: float, most: int = 512) -> int:
    """Returns the least number of cells in each region with which p99 is below the limit. The first region is searched,
    then all are checked. Raises ValueError if `most` are too few: then some prompts take longer than the limit to
    read."""
    low, high = 1, 4
    while not _suffice(parts[:1], high, load, limit_s):
        if high >= most:
            raise ValueError(f"{most} cells in a region do not keep p99 below {limit_s:g} s")
        low, high = high + 1, min(most, high * 2)
    while low < high:
        middle = (low + high) // 2
        if _suffice(parts[:1], middle, load, limit_s):
            high = middle
        else:
            low = middle + 1
    while not _suffice(parts, high, load, limit_s):
        high += 1
    return high


def _suffice(parts: Sequence[Sequence[Arrival]], cells: int, load: Load, limit_s: float) -> bool:
    return result(all_regions(parts, cells, load), load, limit_s).p99_s < limit_s


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def row_of(name: str, results: Sequence[Result], cells: int) -> tuple[str, ...]:
    """`cells`: those in service."""
    return (
        name,
        str(cells),
        _spread([each.p50_s for each in results], ".2f"),
        _spread([each.p99_s for each in results], ".2f"),
        _spread([each.good * 100 for each in results], ".1f"),
        _spread([each.tokens_per_minute / 1e6 for each in results], ".2f"),
        f"{median([each.tokens_per_minute / 60 / cells for each in results]):,.0f}",
        _spread([each.held for each in results], ".0f"),
        _spread([each.broken for each in results], ".0f"),
    )


HEAD = (
    "regions", "cells", "TTFT p50 s", "p99 s", "good %", "good M tokens/min", "good tokens/s a cell", "held",
    "broken answers",
)  # fmt: skip


def main(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    options = parser.parse_args()
    if options.regions < 2 or options.seeds < 1 or min(options.tokens_per_minute, options.measured, options.limit) <= 0:
        parser.error("at least 2 regions and 1 seed; tokens, measured seconds and the limit are above 0")
    load = Load(options.tokens_per_minute, options.count == "all", options.warm_up, options.measured)
    trace = [arrival for arrival in azure() if arrival.at_s < TRACE_S]
    seeds = range(options.seeds)
    parts = {seed: by_region(superposed(trace, load, seed), options.regions, seed) for seed in seeds}
    cells = options.cells or least_cells(parts[0], load, options.limit)
    more = options.cells or least_cells(without_last(parts[0]), load, options.limit)
    print(
        f"{load.copies(trace):.1f} times the trace; {cells} cells in each of {options.regions} regions, "
        f"{more} to keep the limit without one",
        flush=True,
    )
    in_all = cells * options.regions
    rows = [
        _rows("all", parts, load, options, cells, in_all),
        _rows("one lost", parts, load, options, cells, in_all - cells),
    ]
    if more != cells:
        rows.append(_rows("one lost, sized for it", parts, load, options, more, more * (options.regions - 1)))
    print(table(HEAD, rows))
    _print_hosts(options, load, trace)


def _rows(
    name: str,
    parts: Mapping[int, list[list[Arrival]]],
    load: Load,
    options: argparse.Namespace,
    cells: int,
    in_service: int,
) -> tuple[str, ...]:
    results = []
    for seed, by_region in parts.items():
        if name == "all":
            answers = all_regions(by_region, cells, load)
        else:
            answers = one_lost(by_region, cells, load, options.failover)
        results.append(result(answers, load, options.limit))
        note("tokens_per_minute", {"case": name, "seed": seed, "cells": cells, **asdict(results[-1])})
    return row_of(name, results, in_service)


def _print_hosts(options: argparse.Namespace, load: Load, trace: Sequence[Arrival]) -> None:
    requests_per_s = load.copies(trace) * len(trace) / TRACE_S
    tokens_per_s = requests_per_s * sum(arrival.output_tokens for arrival in trace) / len(trace)
    print(hosts_text(options, requests_per_s, tokens_per_s))


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_cost_options(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens-per-minute", type=float, default=3e6)
    parser.add_argument("--count", choices=["answers", "all"], default="answers", help="all: prompts as well")
    parser.add_argument("--cells", type=int, default=0, help="in each region; 0: the least that keep the limit")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds, of p99 of the time to first token")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds")
    parser.add_argument("--measured", type=float, default=40.0, help="seconds")
    parser.add_argument("--failover", type=float, default=10.0, help="seconds until a lost region's requests move")
