"""How well the search for goodput finds a knee that is computable: cells of engine `sim` on virtual time.

`python -m bench.goodput`: a Markdown table. Evenly spaced arrivals against the mean-field knee; Poisson arrivals
against the same search with twenty times as many requests a point. It needs no quiet machine.
"""

import argparse
from time import process_time

from bench.goodput.virtual_cell import VirtualCell, mean_field_knee, search
from engine_agent.engines.sim.batching import ModelParameters
from models_registry.planning.goodput import GoodputRules
from models_registry.planning.workload import Arrival, Slo, Workload

CASES = ((1000, 150, 0.040), (600, 100, 0.030), (3000, 50, 0.080))
SLO_TTFT_S = 3.0
LONG = GoodputRules(min_requests=4000, p99_times=0, most_s=4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--poisson", action="store_true", help="too: some ten minutes of a processor")
    options = parser.parse_args()
    seeds = range(options.seeds)
    print("| workload | arrivals | requests a point | reference | goodput by seed | worst error | points | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for prompt, output, itl_s in CASES:
        slo = Slo(SLO_TTFT_S, itl_s)
        even = Workload("synthetic", prompt, output, arrival=Arrival.UNIFORM)
        _row(even, slo, GoodputRules(), seeds, mean_field_knee(ModelParameters(), even, slo))
        if not options.poisson:
            continue
        poisson = Workload("synthetic", prompt, output)
        reference, _ = search(VirtualCell(ModelParameters(seed=99), poisson, slo, LONG, seed=99))
        for rules in (GoodputRules(), GoodputRules(min_requests=2000)):
            _row(poisson, slo, rules, seeds, reference.estimate)


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
