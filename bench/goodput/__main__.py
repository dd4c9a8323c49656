"""How well the search for goodput finds a knee that is computable: cells of engine `sim` on virtual time.

`python -m bench.goodput`: a Markdown table of evenly spaced arrivals against the mean-field knee. `python -m
bench.goodput --poisson`: how far goodput of one seed is from that of another with Poisson arrivals, by requests a
point. Neither needs a quiet machine; the second takes 0.4 processor seconds for a hundred requests a point and seed.
"""

import argparse
from collections.abc import Sequence
from statistics import mean, pstdev
from time import process_time

from bench.goodput.virtual_cell import VirtualCell, mean_field_knee, search
from engine_agent.engines.sim.batching import ModelParameters
from models_registry.planning.goodput import GoodputRules
from models_registry.planning.workload import Arrival, Slo, Workload

CASES = ((1000, 150, 0.040), (600, 100, 0.030), (3000, 50, 0.080))
SLO_TTFT_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--poisson", action="store_true", help="seeds beside each other, by requests a point")
    parser.add_argument("--requests", default="200,1000", help="of a point with --poisson, with commas")
    options = parser.parse_args()
    seeds = range(options.seeds)
    if options.poisson:
        _poisson(seeds, [int(number) for number in options.requests.split(",")])
        return
    print("| workload | arrivals | requests a point | reference | goodput by seed | worst error | points | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for prompt, output, itl_s in CASES:
        slo = Slo(SLO_TTFT_S, itl_s)
        even = Workload("synthetic", prompt, output, arrival=Arrival.UNIFORM)
        _row(even, slo, GoodputRules(), seeds, mean_field_knee(ModelParameters(), even, slo))


def _poisson(seeds: range, lengths: Sequence[int]) -> None:
    prompt, output, itl_s = CASES[0]
    workload, slo = Workload("synthetic", prompt, output), Slo(SLO_TTFT_S, itl_s)
    print("| requests a point | goodput by seed | mean | standard deviation | minutes a point | points |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in lengths:
        rules = GoodputRules(min_requests=length, p99_times=0, most_s=1e9)
        cells = [VirtualCell(ModelParameters(seed=seed), workload, slo, rules, seed=seed) for seed in seeds]
        found = [search(cell) for cell in cells]
        rates = [one.estimate for one, _ in found]
        minutes = mean(cell.spent_s / len(points) / 60 for cell, (_, points) in zip(cells, found, strict=True))
        by_seed, most = ", ".join(f"{rate:.3f}" for rate in rates), max(len(points) for _, points in found)
        spread = f"{pstdev(rates) / mean(rates):.1%}"
        print(
            f"| {length} | {by_seed} | {mean(rates):.3f}/s | {spread} | {minutes:.1f} | {most} |",
            flush=True,
        )


def _row(workload: Workload, slo: Slo, rules: GoodputRules, seeds: range, reference: float) -> None:
    began_s = process_time()
    found = [search(VirtualCell(ModelParameters(seed=seed), workload, slo, rules, seed=seed)) for seed in seeds]
    rates = [one.estimate for one, _ in found]
    worst = max(abs(rate / reference - 1) for rate in rates)
    by_seed = ", ".join(f"{rate:.3f}" for rate in rates)
    points = max(len(measured) for _, measured in found)
    print(
        f"| {workload.prompt}+{workload.output} within {slo.text} | {workload.arrival} | {rules.min_requests} | "
        f"{reference:.3f}/s | {by_seed} | {worst:.1%} | {points} | {process_time() - began_s:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
