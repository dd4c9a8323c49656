"""A day of 80,000 chips in three regions on virtual time: faults, a rollout, and a region lost for an hour.

Runs the scenario `day_80000_chips` with the live planners and all invariants, and prints one row per seed. `--cells`
and `--hours` make it smaller and shorter.

    .venv/bin/python -m bench chips_day --seeds 3

"Worst served" is the least share of the wanted cells that were ready and whose engine and leader worked, once a minute:
while the region was lost and its cells restarted, and at all other times. A pass is timed with the invariants that are
checked at its writes. Seconds are CPU seconds of this process."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

from bench import note, table
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState
from simulator.scenario import Outcome, Scenario, run
from simulator.scenarios.regions import CELLS, LARGEST, day_of_regions
from simulator.world import World

HEAD = (
    "seed", "cells back", "worst served, region lost", "worst served otherwise", "largest deployment otherwise",
    "min until all are back", "faults", "passes", "slowest pass s", "CPU s", "broken",
)  # fmt: skip

SAMPLE_EVERY_S = 60.0


@dataclass
class PassTimer:
    """CPU seconds of each pass of a world's reconciler, from its first read to its end."""

    seconds: list[float] = field(default_factory=list)
    _began_s: float | None = None

    def watch(self, world: World) -> None:
        prepare, on_pass = world.reconciler.prepare, world.reconciler.on_pass

        def begin(view: FleetView) -> FleetView:
            self._began_s = process_time() if self._began_s is None else self._began_s
            return prepare(view)

        def end() -> None:
            if self._began_s is not None:
                self.seconds.append(process_time() - self._began_s)
            self._began_s = None
            on_pass()

        world.reconciler.prepare, world.reconciler.on_pass = begin, end


@dataclass(frozen=True, slots=True)
class Sample:
    """Serving cells at a second of the run: of all deployments, and of the largest one."""

    at_s: float
    serving: int
    largest: int


@dataclass
class Sampler:
    """Counts once a minute which cells serve."""

    samples: list[Sample] = field(default_factory=list)

    def watch(self, world: World) -> None:
        self._count(world)
        world.queue.after(SAMPLE_EVERY_S, lambda: self.watch(world))

    def _count(self, world: World) -> None:
        serving = [
            cell.deployment
            for cell in world.store.cells.values()
            if cell.state is CellState.READY and _serves(world, cell)
        ]
        self.samples.append(Sample(world.queue.now_s, len(serving), serving.count(LARGEST)))


def _serves(world: World, cell: CellView) -> bool:
    leader = world.provider.machines.get(cell.members[0].node)
    return leader is not None and leader.has_power and world.engines.is_serving(cell.id, cell.generation)


@dataclass(frozen=True, slots=True)
class Outage:
    """Seconds of the run: the region was lost, returned, and its cells were ready again."""

    lost_s: float
    back_s: float
    whole_s: float

    def covers(self, at_s: float) -> bool:
        return self.lost_s <= at_s < self.whole_s


def outage_of(world: World, samples: list[Sample]) -> Outage:
    """The outage is over when as many cells serve as just before it."""
    lost_s = next(entry.at_s for entry in world.timeline.entries if entry.text.startswith("the region is lost"))
    back_s = next(entry.at_s for entry in world.timeline.entries if entry.kind == "region.back")
    before = max((sample for sample in samples if sample.at_s < lost_s), key=lambda sample: sample.at_s).serving
    later = (sample.at_s for sample in samples if sample.at_s > back_s and sample.serving >= before)
    return Outage(lost_s, back_s, next(later, world.queue.now_s))


def result(outcome: Outcome, timer: PassTimer, samples: list[Sample], cpu_s: float) -> dict[str, Any]:
    world = outcome.world
    wanted = {name: sum(spec.cells_wanted.values()) for name, spec in world.store.deployments.items()}
    in_all = sum(wanted.values())
    outage = outage_of(world, samples)
    within = [sample for sample in samples if outage.covers(sample.at_s)]
    otherwise = [sample for sample in samples if not outage.covers(sample.at_s)]
    return {
        "seed": outcome.seed,
        "wanted": in_all,
        "back": samples[-1].serving,
        "worst_lost": min(sample.serving for sample in within) / in_all,
        "worst": min(sample.serving for sample in otherwise) / in_all,
        "worst_largest": min(sample.largest for sample in otherwise) / wanted[LARGEST],
        "back_min": (outage.whole_s - outage.back_s) / 60,
        "faults": world.timeline.counts["fault"] - 1,
        "passes": world.reconciler.passes,
        "slowest_pass_s": max(timer.seconds, default=0.0),
        "passes_s": sum(timer.seconds),
        "cpu_s": cpu_s,
        "broken": len(outcome.failures),
    }


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['seed']}", f"{row['back']} of {row['wanted']}", f"{row['worst_lost']:.1%}", f"{row['worst']:.2%}",
        f"{row['worst_largest']:.1%}", f"{row['back_min']:.1f}", f"{row['faults']}", f"{row['passes']}",
        f"{row['slowest_pass_s']:.2f}", f"{row['cpu_s']:.0f}", f"{row['broken']}",
    )  # fmt: skip


def measured(scenario: Scenario, seed: int, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """Runs one seed and returns its row; prints each failure to standard error."""
    timer, sampler = PassTimer(), Sampler()

    def play(world: World) -> None:
        timer.watch(world)
        sampler.watch(world)
        scenario.play(world)

    began_s = process_time()
    outcome = run(replace(scenario, play=play), seed, progress)
    for failure in outcome.failures:
        print(f"seed {seed}: {failure}", file=sys.stderr)
    return result(outcome, timer, sampler.samples, process_time() - began_s)


def main(parser: argparse.ArgumentParser) -> int:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=CELLS, help="cells of four nodes with four chips each")
    parser.add_argument("--hours", type=float, default=24.0, help="length of the day")
    options = parser.parse_args()
    if options.seeds < 1 or options.cells < 25 or not 0.5 <= options.hours <= 24:
        parser.error("at least 1 seed and 25 cells, one for each deployment; from 0.5 to 24 hours")
    scenario = day_of_regions(options.cells, options.hours)
    print(scenario.about, flush=True)
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        rows.append(measured(scenario, seed))
        note("chips_day", rows[-1])
    print(table(HEAD, map(cells_of, rows)))
    return int(any(row["broken"] for row in rows))
