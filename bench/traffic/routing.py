"""Latency by routing rule with one slow cell, on virtual time.

All rules get the same arrivals. Two questions: what time to first token does each rule give at the same rate, and what
rate does each sustain while the 99th percentile stays within a bound. Every result is appended to a file; `report` sums
it up.

    .venv/bin/python -m bench routing [--seeds 3] [--requests 3000]
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from bench import note, percentile
from bench.traffic.arrivals import heavy_tailed
from bench.traffic.routers import LeastOutstanding, RandomCell, RoundRobin, Router, Simulation
from engine_agent.engines.sim.batching import ModelParameters

PLACES = 16
CELL = ModelParameters(
    prefill_tokens_per_s=20_000,
    decode_step_ms=10,
    decode_step_per_seq_ms=0.25,
    max_num_seqs=PLACES,
    prefix_block_tokens=0,
)
"""A step takes 10 to 14 ms. With 16 concurrent sequences a cell makes about 1,100 tokens a second."""
CELLS = 8
SLOW_FACTOR = 3.0
BOUND_S = 0.5
"""Of the 99th percentile of the time to first token; without a queue it is about 0.1 s, on the slow cell."""
RATES = (60, 80, 100, 110)
GRID = range(20, 141, 5)
POLICIES: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "random": RandomCell,
    "better of two random": lambda: RandomCell(of=2),
    "least outstanding": lambda: LeastOutstanding(with_queue=False),
    "ours (least outstanding and one queue)": lambda: LeastOutstanding(with_queue=True),
}


def run(policy: str, rate: float, requests: int, seed: int, slow_factor: float) -> dict[str, Any]:
    """One run; the first tenth of the requests warms up and is not counted."""
    factors = [1.0] * (CELLS - 1) + [slow_factor]
    outcomes = Simulation(POLICIES[policy](), CELL, factors, PLACES).run(heavy_tailed(rate, requests, seed))
    ttft_ms = [outcome.ttft_s * 1000 for outcome in outcomes[requests // 10 :]]
    slow = sum(outcome.cell == CELLS - 1 for outcome in outcomes) / len(outcomes)
    return {
        "policy": policy, "rate": rate, "seed": seed, "requests": requests, "slow_factor": slow_factor, "to_slow": slow,
        "p50_ms": percentile(ttft_ms, 0.5), "p99_ms": percentile(ttft_ms, 0.99),
    }  # fmt: skip


def sustained(policy: str, requests: int, seeds: int, slow_factor: float) -> int:
    """The highest rate of the grid whose median p99 stays within the bound, by bisection; 0: none."""
    low, high = 0, len(GRID)
    while low < high:
        middle = (low + high) // 2
        p99_ms = median(run(policy, GRID[middle], requests, seed, slow_factor)["p99_ms"] for seed in range(seeds))
        if p99_ms <= BOUND_S * 1000:
            low = middle + 1
        else:
            high = middle
    return GRID[low - 1] if low else 0


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--policies", default=",".join(POLICIES), help="of: " + "; ".join(POLICIES))
    options = parser.parse_args()
    for policy in options.policies.split(","):
        for rate in RATES:
            for seed in range(options.seeds):
                note("routing", run(policy, rate, options.requests, seed, SLOW_FACTOR))
        for factor in (1.0, SLOW_FACTOR):
            rate = sustained(policy, options.requests, options.seeds, factor)
            note(
                "routing",
                {"policy": policy, "slow_factor": factor, "sustained": rate, "bound_ms": BOUND_S * 1000},
            )
