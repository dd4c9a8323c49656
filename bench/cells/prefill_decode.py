"""Goodput of four cells by how many of them only read prompts, on virtual time.

Cells are those of the default 70B model, with limits on the first token and between tokens. Prints a Markdown table in
about five CPU minutes; needs no quiet machine.
"""

import argparse
import os
from time import process_time

from bench.cells.virtual_cells import Fleet, Load, goodput, measure

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
