"""Splits into prefill and decode cells that the planner chooses next to the best ones, on virtual time.

Prints a Markdown table and the reasons of the planner in about ten CPU minutes; needs no quiet machine."""

import argparse
import os
from time import process_time

from bench.cells.prefill_decode import Fleet, Load, goodput
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.protocol.messages import PREFILL_FROM_TOKENS
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.autoscaling.planning.roles import (
    RatioView,
    RoleDemand,
    RoleLimits,
    RolePace,
    handover_from_tokens,
    plan_ratio,
)

CELLS = 4
TTFT_S, ITL_S = 1.5, 0.05
LOADS = (
    (Load(3000, 200), 2.6),
    (Load(1000, 150), 6.0),
    (Load(3000, 50), 3.0),
    (Load(300, 100), 8.0),
    (Load(100, 100), 20.0),
)
"""And the requests a second that are planned for."""
THRESHOLD_LOADS = (Load(300, 100), Load(500, 150))


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=400, help="of one point")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limits = RoleLimits(TTFT_S, ITL_S)
    least = handover_from_tokens(_pace(), limits) or PREFILL_FROM_TOKENS
    splits = [RoleSplit(mixed=CELLS), *(RoleSplit(0, prefill, CELLS - prefill) for prefill in range(1, CELLS))]
    print("| load | " + " | ".join(map(str, splits)) + " | best | planned | of the best |")
    print("| --- |" + " --- |" * (len(splits) + 3))
    reasons = []
    for load, rate in LOADS:
        fleets = {split: Fleet(split.mixed, split.prefill, split.decode, from_tokens=least) for split in splits}
        carried = {
            split: goodput(fleet, load, TTFT_S, ITL_S, options.requests, options.seed)
            for split, fleet in fleets.items()
        }
        best = max(splits, key=lambda split: carried[split])
        demand = RoleDemand(rate, load.prompt, load.output, requests=1000)
        planned = plan_ratio(RatioView(CELLS, RoleSplit(mixed=CELLS), limits, _pace(), demand))
        figures = " | ".join(f"{carried[split]:.2f}" for split in splits)
        share = carried[planned.split] / carried[best]
        print(f"| {load} at {rate:g}/s | {figures} | {best} | {planned.split} | {share:.0%} |", flush=True)
        reasons.append(f"{load}: {planned.reason}")
    print("\n" + "\n".join(reasons))
    _print_thresholds(least, options.requests, options.seed)
    print(f"\n{process_time():.0f} s of a processor; load average {os.getloadavg()[0]:.1f}")


def _print_thresholds(least: int, requests: int, seed: int) -> None:
    """What one prefill cell and three decode cells carry by the length from which prompts are handed over."""
    print(f"\n| load | 1P3D from {PREFILL_FROM_TOKENS} tokens on | from {least}, as planned |\n| --- | --- | --- |")
    for load in THRESHOLD_LOADS:
        found = [
            goodput(Fleet(prefill=1, decode=3, from_tokens=tokens), load, TTFT_S, ITL_S, requests, seed)
            for tokens in (PREFILL_FROM_TOKENS, least)
        ]
        print(f"| {load} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)


def _pace() -> RolePace:
    engine, handover = ModelParameters(), HandoverParameters()
    return RolePace(
        step_s=engine.decode_step_ms / 1000,
        sequence_s=engine.decode_step_per_seq_ms / 1000,
        prompt_token_s=1 / engine.prefill_tokens_per_s,
        chunk_tokens=engine.prefill_chunk_tokens,
        most_at_once=engine.max_num_seqs,
        handover_s=handover.base_ms / 1000,
        handover_token_s=handover.mb_per_token / handover.gb_per_s / 1000,
    )
