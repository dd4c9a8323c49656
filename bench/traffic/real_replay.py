"""A recorded trace through the real ingress to real `sim` cells, by several rules: what their caches found.

It confirms what `replay` simulates. Everything runs `SPEED` times as fast as it was recorded: prompts are read so many
times as fast and answers have so many times fewer tokens, while a step lasts as long as ever.

    .venv/bin/python -m bench.traffic.real_replay [--minutes 15] [--rules least,sticky,exact] [--slow 3]
"""

import argparse
import contextlib
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.traffic import contenders
from bench.traffic.arrivals import MOONCAKE_BLOCK_TOKENS, Arrival, best_hit_rate, faster, mooncake
from bench.traffic.client import Seen, ask, body_of, play
from bench.traffic.contenders import MODEL, ROOT
from bench.traffic.replay import CACHE_TOKENS, CELLS, PLACES, PREFILL_TOKENS_PER_S
from bench.traffic.sim_cells import SimCell, sim_cells
from bench.traffic.simulation import percentile
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.ingress_messages import Affinity, CellEndpoint

RESULTS = ROOT / ".cache" / "bench" / "real_replay.jsonl"
SPEED = 10
CELL = ModelParameters(
    prefill_tokens_per_s=PREFILL_TOKENS_PER_S * SPEED,
    prefill_chunk_tokens=ModelParameters.prefill_chunk_tokens * SPEED,
    kv_capacity_tokens=CACHE_TOKENS,
    max_num_seqs=PLACES,
    prefix_block_tokens=MOONCAKE_BLOCK_TOKENS,
)
LONGEST_TOKENS = 200_000
WORD = "the"
"""With the space before it four bytes, as a token of a text has: ingresses weigh text by its bytes."""
RULES = {"least": None, "sticky": Affinity(), "exact": Affinity()}


def scaled(minutes: float) -> list[Arrival]:
    """The first minutes of the Mooncake trace, at `SPEED`."""
    arrivals = [arrival for arrival in mooncake() if arrival.at_s < minutes * 60]
    shorter = [replace(arrival, output_tokens=max(1, arrival.output_tokens // SPEED)) for arrival in arrivals]
    return faster(shorter, SPEED)


async def measure(port: int, arrivals: list[Arrival]) -> dict[str, Any]:
    """Send them all."""
    tries: list[Seen] = []

    async def one(arrival: Arrival) -> None:
        tries.append(await ask(port, body_of(arrival, MODEL, MOONCAKE_BLOCK_TOKENS, WORD)))

    await play(arrivals, one)
    ttft_s = [seen.ttft_s for seen in tries if seen.whole]
    by_cell = sorted(sum(seen.cell == cell for seen in tries) for cell in {seen.cell for seen in tries})
    return {
        "requests": len(tries),
        "failed": len(tries) - len(ttft_s),
        "ttft_s": {str(share): percentile(ttft_s, share) for share in (0.5, 0.9, 0.99)},
        "most_over_mean": by_cell[-1] / (sum(by_cell) / len(by_cell)),
    }


def replayed(folder: Path, base: int, rule: str, slow: float, arrivals: list[Arrival]) -> dict[str, Any]:
    """One run with fresh cells, the first of them `slow` times as slow as the others."""
    factors = [slow] + [1.0] * (CELLS - 1)
    with ExitStack() as stack:
        cells = stack.enter_context(sim_cells(folder, base + 20, CELL, factors, LONGEST_TOKENS))
        ends = [cell.endpoint for cell in cells]
        stack.enter_context(_ingress(folder, base, ends, rule))
        contenders.wait_until_it_answers(base)
        before = _prefix_counts(cells)
        found = uvloop.run(measure(base, arrivals))
        hits, queries = (after - then for after, then in zip(_prefix_counts(cells), before, strict=True))
    return {"rule": rule, "slow": slow, "speed": SPEED, "hit_rate": hits / queries, **found}


def _ingress(
    folder: Path, base: int, ends: list[CellEndpoint], rule: str
) -> contextlib.AbstractContextManager[psutil.Process]:
    home = folder / f"ingress-{rule}"
    return contenders.ingress(home, base, ends, RULES[rule], by_cache=rule == "exact")


def _prefix_counts(cells: list[SimCell]) -> tuple[float, float]:
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    hits, queries = (sum(cell.metric(name) for cell in cells) for name in names)
    return hits, queries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=15.0, help="of the trace")
    parser.add_argument("--rules", default="least,sticky,exact", help="of " + ", ".join(RULES))
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as slow the first cell is")
    parser.add_argument("--base-port", type=int, default=27700)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    arrivals = scaled(options.minutes)
    for rule in options.rules.split(","):
        folder = ROOT / ".cache" / "bench" / "runs" / "replay"
        row = replayed(folder, options.base_port, rule, options.slow, arrivals)
        row |= {"minutes": options.minutes, "best_hit_rate": best_hit_rate(arrivals)}
        with options.results.open("a", encoding="utf-8") as results:
            results.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
