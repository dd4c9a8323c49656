"""Batch work beside real-time requests in one cell: rules compared, the order of a batch's lines, and a surge.

    .venv/bin/python -m bench.batch_beside_realtime rules --seeds 1000
    .venv/bin/python -m bench.batch_beside_realtime prefixes --seeds 20
    .venv/bin/python -m bench.batch_beside_realtime surge --seeds 200
    .venv/bin/python -m bench.batch_beside_realtime live --engine sim --minutes 4

The first three are on virtual time and give the same figures on any machine; the last one starts real processes.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from time import perf_counter

from bench.guest.live import SCALES, cell, measured, rules_of
from bench.guest.prefixes import compared
from bench.guest.rules import rule_of
from bench.guest.surge import AS_ALONE, SLOTS, surge
from bench.guest.world import Cell, Load, Measured

RULES = (
    ("alone", 0), ("no rule", 0), ("75 % of slots", 0), ("priority only", 0), ("llm-d gates", 0),
    ("one prompt", 0), ("one prompt, window", 0),
    ("classes", 256), *(("guest", tokens) for tokens in (128, 192, 256, 320, 384)),
)  # fmt: skip


COLUMNS = (
    *("rule", "tokens a step", "TTFT p50 / p95 / p99 ms", "p99 by alone", "ITL p50 / p95 / p99 ms", "p99 by alone"),
    *("batch tokens/s", "by no rule", "in the engine"),
)


def one_run(rule: str, tokens: int, load: Load, seed: int) -> Measured:
    measured = Cell(rule_of(rule, SLOTS, tokens), load, seed).run()
    measured.firsts.clear()
    return measured


def rules(options: argparse.Namespace) -> None:
    """A table of rules."""
    load = Load(rate=options.rate)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    alone = no_rule = Measured()
    with Pool(options.processes) as pool:
        for rule, tokens in RULES:
            if options.rules and rule not in options.rules:
                continue
            total = Measured()
            for each in pool.imap_unordered(partial(one_run, rule, tokens, load), range(options.seeds), chunksize=5):
                total.merge(each)
            alone = total if rule == "alone" else alone
            no_rule = total if rule == "no rule" else no_rule
            print(_row(rule, tokens, total, alone, no_rule), flush=True)


def _row(rule: str, tokens: int, total: Measured, alone: Measured, no_rule: Measured) -> str:
    def of(counts: str) -> tuple[str, str]:
        known, base = getattr(total, counts), getattr(alone, counts)
        return " / ".join(str(known.quantile_ms(share)) for share in (0.5, 0.95, 0.99)), (
            f"{known.quantile_ms(0.99) / max(1, base.quantile_ms(0.99)):.3f}"
        )

    share = f"{total.tokens_per_s / no_rule.tokens_per_s:.2f}" if no_rule.tokens else ""
    in_engine = sum(total.windows) / max(1, len(total.windows))
    cells = (rule, str(tokens or ""), *of("ttft"), *of("itl"), f"{total.tokens_per_s:.0f}", share, f"{in_engine:.0f}")
    return "| " + " | ".join(cells) + " |"


def prefixes(options: argparse.Namespace) -> None:
    """Two orders of the same lines."""
    with Pool(options.processes) as pool:
        found = pool.map(partial(compared, options.lines, options.prefixes, options.answer), range(options.seeds))
    for place, name in enumerate(("as in the file", "as sent")):
        runs = [each[place] for each in found]
        rate, cached = _mean(run.tokens_per_s for run in runs), _mean(run.cached for run in runs)
        ttft = max(run.ttft.quantile_ms(0.99) for run in runs)
        print(f"{name}: {rate:.0f} tokens/s, {cached:.0%} of prompt tokens from the cache, TTFT p99 {ttft} ms at most")
    gains = sorted(ours.tokens_per_s / theirs.tokens_per_s for theirs, ours in found)
    print(f"{gains[len(gains) // 2]:.2f} times as many tokens a second in the median, {gains[0]:.2f} at least")


def surges(options: argparse.Namespace) -> None:
    """By second after the surge began."""
    with Pool(options.processes) as pool:
        found = pool.map(partial(surge, options.rule, options.tokens), range(options.seeds))
    for second in range(11):
        pairs = [pair for each in found for pair in each.excess.get(second, ())]
        alone, beside = (_mean(pair[which] for pair in pairs) for which in (0, 1))
        ratio = beside / max(alone, 1e-9)
        print(
            f"second {second:2}: TTFT {alone * 1000:5.0f} ms alone, {beside * 1000:5.0f} beside batch work, {ratio:.3f}"
        )
    later = [pair for each in found for second, pairs in each.excess.items() if second >= 2 for pair in pairs]
    alone, beside = (_p99(pair[which] for pair in later) for which in (0, 1))
    ratio = f"{beside / alone:.3f} (goal {AS_ALONE})"
    print(f"from 2 s on: p99 {alone * 1000:.0f} ms alone, {beside * 1000:.0f} beside, {ratio}")
    refused = [sum(each.refused[place] for each in found) for place in (0, 1)]
    print(f"refused: {refused[0]} beside batch work, {refused[1]} alone")


def live(options: argparse.Namespace) -> None:
    """The real parts, one rule after the other."""
    scale = SCALES[options.engine]
    seconds = options.minutes * 60 / len(rules_of(scale))
    load = Load(rate=scale.rate, batch_from_s=seconds * 0.25, warm_up_s=seconds * 0.4, measured_s=seconds * 0.6)
    load = replace(load, surge=options.surge, surge_at_s=seconds * 0.7 if options.surge > 1 else 0.0)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    alone = no_rule = Measured()
    for name, rule in rules_of(scale).items():
        with cell(options.engine, scale, rule) as (url, model):
            total, refused = asyncio.run(measured(url, model, scale, rule, load, seed=options.seed))
        alone = total if name == "alone" else alone
        no_rule = total if name == "no rule" else no_rule
        tokens = scale.tokens if name == "guest" else 0
        print(_row(name, tokens, total, alone, no_rule) + f" refused {refused}", flush=True)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _p99(values: Iterable[float]) -> float:
    listed = sorted(values)
    return listed[int(0.99 * len(listed))]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    for name, run, seeds in (("rules", rules, 1000), ("prefixes", prefixes, 20), ("surge", surges, 200)):
        mode = modes.add_parser(name)
        mode.set_defaults(run=run)
        mode.add_argument("--seeds", type=int, default=seeds)
        mode.add_argument("--processes", type=int, default=2)
        mode.add_argument("--rate", type=float, default=1.2, help="real-time requests a second")
        mode.add_argument("--rules", nargs="*", help="only these")
        mode.add_argument("--rule", default="guest")
        mode.add_argument("--tokens", type=int, default=256, help="of batch prompts in a step")
        mode.add_argument("--lines", type=int, default=4000)
        mode.add_argument("--prefixes", type=int, default=60, help="different instructions")
        mode.add_argument("--answer", type=int, default=150, help="tokens of an answer in the mean")
    mode = modes.add_parser("live")
    mode.set_defaults(run=live)
    mode.add_argument("--engine", choices=sorted(SCALES), default="sim")
    mode.add_argument("--minutes", type=float, default=4.0, help="of all rules together")
    mode.add_argument("--surge", type=float, default=1.0, help="times as many real-time requests in the last third")
    mode.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    began = perf_counter()
    options.run(options)
    print(f"{perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
