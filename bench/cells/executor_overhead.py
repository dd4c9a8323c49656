"""Time of a decode step in a two-node cell next to vLLM's multiprocess executor.

    .venv/bin/python -m bench executor_overhead [--rounds 5] [--tokens 48] [--write]

All replicas run at once and take requests in turn, so that each meets the same machine. Prints Markdown: medians over
the rounds of the time of a step, and of the ratio to vLLM's executor in the same round; `--write` puts it beside this
file.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import httpx

from bench.cells.executor_cell import Engine, engine
from bench.places import PAGES

BATCHES = (1, 4, 16)
SETTLE_TOKENS = 4
"""Until all streams of a batch have begun."""
PROMPT = "Once upon a time"
TP = ("--tensor-parallel-size", "2")
OWN = "vLLM's mp"
SHM, NETWORK = "cell, shared memory", "cell, gloo over TCP"


def step_ms(of: Engine, batch: int, tokens: int) -> float:
    """Milliseconds of one decode step: the median gap between two tokens of a stream, in a batch of such streams."""
    with ThreadPoolExecutor(batch) as clients:
        gaps = list(clients.map(lambda _: _gaps_ms(of, tokens), range(batch)))
    return statistics.median(gap for stream in gaps for gap in stream)


def _gaps_ms(of: Engine, tokens: int) -> list[float]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{of.url}/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        at = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return [(later - earlier) * 1e3 for earlier, later in pairwise(at[SETTLE_TOKENS:])]


def measure(replicas: dict[str, Engine], rounds: int, tokens: int) -> dict[tuple[str, int], list[float]]:
    """Step times of each replica and batch, one a round."""
    times: dict[tuple[str, int], list[float]] = {(name, batch): [] for name in replicas for batch in BATCHES}
    for turn in range(rounds):
        names = list(replicas)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for batch in BATCHES:
                times[name, batch].append(step_ms(replicas[name], batch, tokens))
    return times


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        replicas = {
            OWN: stack.enter_context(engine(2, 1, *TP, "--distributed-executor-backend", "mp")),
            SHM: stack.enter_context(engine(3, 2, *TP, SWITCHYARD_CELL_COLLECTIVES="shared-memory")),
            NETWORK: stack.enter_context(engine(4, 2, *TP, SWITCHYARD_CELL_COLLECTIVES="network")),
        }
        measure(replicas, 1, 8)
        times = measure(replicas, options.rounds, options.tokens)
    lines = [
        "# A decode step in a two-node cell\n",
        f"{time.strftime('%Y-%m-%d')}, SmolLM2-135M, bf16, tensor-parallel 2, one thread a rank, {options.rounds} "
        f"rounds of {options.tokens} tokens, all replicas on one machine taking requests in turn; "
        f"load average {os.getloadavg()[1]:.0f}, most of it their own. In some rounds of a batch of 16 the client got "
        "several tokens at once, and the median gap says nothing: hence the extremes.\n",
        "| executor | batch | ms a step, median | of vLLM's mp, median of rounds | lowest to highest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (name, batch), taken in times.items():
        ratios = [own / mp for own, mp in zip(taken, times[OWN, batch], strict=True)]
        lines.append(
            f"| {name} | {batch} | {statistics.median(taken):.1f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        (PAGES / "executor_overhead.md").write_text(result)
