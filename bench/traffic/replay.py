"""Prefix-cache hits in recorded traffic by routing rule, on virtual time.

The cells run on virtual time, so an hour passes in a minute and twice the same. Every result is appended to a file;
`report` sums it up.

    .venv/bin/python -m bench replay mooncake|azure [--policies least,sticky] [--factors 1.0]
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from bench import note, percentile
from bench.traffic.arrivals import MOONCAKE_BLOCK_TOKENS, Arrival, azure, best_hit_rate, faster, lru_hit_rate, mooncake
from bench.traffic.routers import (
    BoundedHash,
    Exact,
    LeastOutstanding,
    Outcome,
    RandomCell,
    RoundRobin,
    Router,
    Simulation,
    Sticky,
    TwoChoices,
    hit_rate,
)
from engine_agent.engines.sim.batching import ModelParameters

CELLS = 8
PLACES = 32
"""Concurrent requests per cell, as the ingress limits them."""
PREFILL_TOKENS_PER_S = 8000.0
"""The simulator's default, about a 70B model on one 8-accelerator node: 8 cells read 64,000 tokens a second where the
Mooncake trace sends 41,000."""
CACHE_TOKENS = 1_000_000
"""Tokens that a node caches in 320 GB next to the weights: 320 kB each (Llama-3-70B, 16 bit)."""
POLICIES: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "random": RandomCell,
    "least": lambda: LeastOutstanding(with_queue=True),
    "hash": lambda: BoundedHash(0, own_queues=True),
    "bounded hash 1.25": lambda: BoundedHash(1.25, light_share=0.25),
    "bounded hash 2": lambda: BoundedHash(2.0, light_share=0.25),
    "two choices": TwoChoices,
    "sticky": lambda: Sticky(0),
    "sticky 1.25": lambda: Sticky(1.25),
    "exact": lambda: Exact(0),
    "exact 1.25": lambda: Exact(1.25),
}


def run(
    trace: str,
    arrivals: list[Arrival],
    policy: str,
    factor: float,
    cells: int = CELLS,
    cache_tokens: int = CACHE_TOKENS,
    slow: float = 1.0,
) -> dict[str, Any]:
    """The whole trace, `factor` times as fast as it was recorded, the first cell `slow` times as slow as the others."""
    parameters = ModelParameters(
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        kv_capacity_tokens=cache_tokens,
        max_num_seqs=PLACES,
        prefix_block_tokens=MOONCAKE_BLOCK_TOKENS,
    )
    outcomes = Simulation(POLICIES[policy](), parameters, [slow] + [1.0] * (cells - 1), PLACES).run(
        faster(arrivals, factor)
    )
    return {
        "trace": trace,
        "policy": policy,
        "factor": factor,
        "cells": cells,
        "cache_tokens": cache_tokens,
        "slow": slow,
        **summary(outcomes),
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a run gave; shares of requests by cell from the least to the most loaded."""
    ttft_s = [outcome.ttft_s for outcome in outcomes]
    lasted_s = max(outcome.ended_s for outcome in outcomes) - outcomes[0].arrival.at_s
    prompt = sum(outcome.arrival.prompt_tokens for outcome in outcomes)
    by_cell = sorted(
        sum(outcome.cell == cell for outcome in outcomes) for cell in {outcome.cell for outcome in outcomes}
    )
    return {
        "requests": len(outcomes),
        "hit_rate": hit_rate(outcomes),
        "ttft_s": {str(share): percentile(ttft_s, share) for share in (0.5, 0.9, 0.99)},
        "prompt_tokens_per_s": prompt / lasted_s,
        "answer_tokens_per_s": sum(outcome.arrival.output_tokens for outcome in outcomes) / lasted_s,
        "most_over_mean": by_cell[-1] / (sum(by_cell) / len(by_cell)),
    }


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", choices=["mooncake", "azure"])
    parser.add_argument("--policies", default=",".join(POLICIES), help="of: " + ", ".join(POLICIES))
    parser.add_argument("--factors", default="1.0", help="how much faster than recorded, with commas")
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as slow the first cell is")
    options = parser.parse_args()
    arrivals = mooncake() if options.trace == "mooncake" else azure()
    one = lru_hit_rate(arrivals, options.cells * options.cache_tokens)
    print(f"one cell with the memory of all would find {one:.1%}", flush=True)
    for factor in map(float, options.factors.split(",")):
        for policy in options.policies.split(","):
            row = run(options.trace, arrivals, policy, factor, options.cells, options.cache_tokens, options.slow)
            note("replay", row)
    note("replay", {"trace": options.trace, "policy": "ideal", "hit_rate": best_hit_rate(arrivals)})
