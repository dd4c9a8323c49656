"""Cost and lost minutes of daily capacity plans over recorded weeks, on virtual time.

The live planners (forecast, plan, autoscaler, reconciler) run over a simulated fleet whose machines boot and whose
engines load. They are compared with a fleet of the size of the peaks, a reactive one, a schedule, and a plan that knows
the future load.

    .venv/bin/python -m bench capacity_plan --days 14
    .venv/bin/python -m bench capacity_plan --load azure --days 7
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from bench.capacity.autoscaling import (
    BOOT_SHARE,
    DAY_S,
    NODES,
    PACE,
    SERVICE_S,
    Fixed,
    Load,
    azure_2024,
    servegen,
    with_bursts,
)
from bench.capacity.demand import REGION, forecasts, mean_rate, perfect
from bench.capacity.policies import (
    BATCH_SHARE,
    FILL,
    LOOK_S,
    PEAK_CELLS,
    PRICE,
    START_UP_S,
    TARGET,
    TOKENS,
    Batches,
    Planned,
    Planner,
    Schedule,
)
from fleet.planning.autoscaling.policy import CellRange, parse_scaling_policy
from fleet.planning.autoscaling.view import PlannedNeed
from fleet.planning.capacity.view import Demand
from fleet.planning.forecast.series import SLOT_S
from fleet.planning.provider_limits import ProviderLimits
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.load_replay import Course, LoadReplay, PolicyScaler, Scaler, Serving
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

RECORDS: Mapping[str, tuple[Callable[[str, float], Load], tuple[str, ...]]] = {
    "servegen": (servegen, ("m_large", "m_mid", "m_small")),
    "azure": (azure_2024, ("conversation", "code")),
}


@dataclass
class Run:
    """A policy over the weeks: a course for each deployment, and what became of batches."""

    courses: Mapping[str, Course]
    batches: Batches
    planner: Planner | None
    took_s: float


def replay(
    loads: Mapping[str, Load],
    per_cell: Mapping[str, float],
    scalers: Mapping[str, Scaler],
    batches: Batches,
    planner: Planner | None,
    begin: Mapping[str, int],
    start_up_s: float,
    seconds: float,
) -> Run:
    """One run: deployments, machines that any of them may use, no spares, and the loads."""
    began, load_s, boot_s = time.process_time(), (1 - BOOT_SHARE) * start_up_s, BOOT_SHARE * start_up_s
    specs = tuple(DeploymentSpec(name, {REGION: begin[name]}, size=NODES, ready_timeout_s=3 * load_s) for name in loads)
    fleet = build_fleet(FleetSpec(specs, spares=0))
    limits = ProviderLimits(join_timeout_s=4 * boot_s, boot_s=boot_s)
    regions = {name: replace(region, limits=limits) for name, region in fleet.regions.items()}
    behaviours = {"v1": VersionBehaviour(load_s=load_s, load_spread=0.1)}
    world = World(replace(fleet, regions=regions), behaviours=behaviours, skip_repeats=True)
    world.provider.boot_s = boot_s
    world.reconciler.pace = PACE
    if planner is not None:
        of_the_world = world.reconciler.prepare
        world.reconciler.prepare = lambda view: planner.seen(of_the_world(view))
    replays = {
        name: LoadReplay(
            world, (name, REGION), loads[name].rate, scalers[name],
            serving=Serving(per_cell[name], SERVICE_S, waiting_per_cell=per_cell[name] / 4),
            cells=CellRange(1, 3 * PEAK_CELLS), look_every_s=LOOK_S,
        )
        for name in loads
    }  # fmt: skip

    def guests() -> None:
        batches.at(world.queue.now_s)
        for name, seen in replays.items():
            ready = world.ready[name, REGION]
            batches.serve(name, FILL * ready * per_cell[name] - seen.working, LOOK_S)
        world.queue.after(LOOK_S, guests)

    world.queue.at(0.0, guests)
    world.run_until(seconds)
    courses = {name: seen.course for name, seen in replays.items()}
    return Run(courses, batches, planner, time.process_time() - began)


class Comparison:
    """What is the same for all policies."""

    def __init__(self, loads: Mapping[str, Load], days: float, start_up_s: float) -> None:
        self.loads, self.days, self.seconds, self.start_up_s = loads, days, days * DAY_S, start_up_s
        self.per_cell = {name: load.peak * SERVICE_S / (TARGET * PEAK_CELLS) for name, load in loads.items()}
        self._daily = {
            name: BATCH_SHARE * DAY_S * SERVICE_S * _average(load, self.seconds) for name, load in loads.items()
        }

    def runs(self, only: str) -> Iterator[tuple[str, Run]]:
        policies: Mapping[str, Callable[[], Run]] = {
            "static peak": lambda: self._run({name: Fixed(PEAK_CELLS) for name in self.loads}, begin=PEAK_CELLS),
            "reactive, 30 % head-room": lambda: self._run({name: self._reactive(name) for name in self.loads}),
            "schedule": lambda: self._run({name: Schedule(self._windows(name)) for name in self.loads}),
            "ours: forecast and plan": lambda: self._planned(self._forecast()),
            "oracle: the same, all known": lambda: self._planned(self._known()),
            "oracle's plan alone": lambda: self._planned(self._known(), alone=True),
        }
        for name, run in policies.items():
            if not only or any(part in name for part in only.split(",")):
                yield name, run()

    def _run(self, scalers: Mapping[str, Scaler], planner: Planner | None = None, begin: int = 0) -> Run:
        batches = planner.batches if planner else Batches(self._daily)
        first = {name: begin or self._cells(name, self.loads[name].rate(0.0)) for name in self.loads}
        return replay(self.loads, self.per_cell, scalers, batches, planner, first, self.start_up_s, self.seconds)

    def _reactive(self, name: str, planned: Callable[[datetime], PlannedNeed | None] | None = None) -> PolicyScaler:
        policy = parse_scaling_policy({"mode": "act", "target_utilisation": TARGET})
        return PolicyScaler(policy, self.per_cell[name], self.start_up_s, planned=planned)

    def _planned(self, expected: Callable[[str, float], Demand | None], alone: bool = False) -> Run:
        planner = Planner(expected, self.per_cell, self.start_up_s, Batches(self._daily), 6 * PEAK_CELLS * NODES)
        planner.cells = {name: self._cells(name, self.loads[name].rate(0.0)) for name in self.loads}

        def needs(name: str) -> Callable[[datetime], PlannedNeed | None]:
            return lambda now: planner.need(name, now)

        scalers = {name: Planned(name, planner, self._reactive(name, needs(name)), alone) for name in self.loads}
        return self._run(scalers, planner)

    def _forecast(self) -> Callable[[str, float], Demand | None]:
        rows = forecasts(self.loads, self.seconds)
        return lambda name, now_s: rows[name][min(int(now_s // SLOT_S), len(rows[name]) - 1)]

    def _known(self) -> Callable[[str, float], Demand | None]:
        known = {name: perfect(load, self.seconds) for name, load in self.loads.items()}
        return lambda name, now_s: known[name](now_s)

    def _windows(self, name: str) -> tuple[int, ...]:
        load, week = self.loads[name], range(max(1, int(self.days / 2)))
        return tuple(
            max(self._cells(name, mean_rate(load, day * DAY_S + hour * 3600.0 + part * 600.0, 600.0))
                for day in week for part in range(6))
            for hour in range(24)
        )  # fmt: skip

    def _cells(self, name: str, rate: float) -> int:
        return max(1, math.ceil(rate * SERVICE_S / (TARGET * self.per_cell[name])))


def _average(load: Load, seconds: float) -> float:
    return sum(load.rate(second) for second in range(0, int(seconds), 600)) / max(1, int(seconds) // 600)


COLUMNS = (
    "policy", "dollars/day", "of the oracle", "cell h/day", "SLO minutes lost/day", "refused %", "shifts/day",
    "turns/day", "batches done in time %", "batch Mtokens/day", "ms a plan", "processor s",
)  # fmt: skip


def line(name: str, run: Run, days: float, oracle: float | None) -> str:
    courses, batches = run.courses.values(), run.batches
    arrived = sum(one.arrived for one in courses)
    cost = _cost(run) / days
    in_time = 100 * (1 - batches.missed / batches.given) if batches.given else 100.0
    plan_ms = f"{1000 * run.planner.took_s / run.planner.plans:.0f}" if run.planner else ""
    cells = (
        name,
        f"{cost:,.0f}",
        f"{100 * cost * days / oracle:.0f} %" if oracle else "",
        f"{sum(one.cell_s for one in courses) / 3600 / days:.0f}",
        f"{sum(one.minutes_lost for one in courses) / days:.1f}",
        f"{100 * sum(one.refused for one in courses) / arrived:.3f}",
        f"{sum(one.changes for one in courses) / days:.0f}",
        f"{sum(one.turns for one in courses) / days:.0f}",
        f"{in_time:.1f}",
        f"{batches.done / SERVICE_S * TOKENS / 1e6 / days:,.0f}",
        plan_ms,
        f"{run.took_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _cost(run: Run) -> float:
    """Machines are shared: each course counts those of the fleet."""
    return next(iter(run.courses.values())).machine_s / 3600 * PRICE


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", choices=sorted(RECORDS), default="servegen")
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--bursts", action="store_true", help="With the bursts of Azure's hour laid over it.")
    parser.add_argument("--start-up", type=float, default=START_UP_S, help="Seconds until a cell is ready.")
    parser.add_argument("--only", default="", help="Policies whose names have one of these in them, between commas.")
    given = parser.parse_args()
    record, names = RECORDS[given.load]
    loads = {name: record(name, given.days) for name in names}
    if given.bursts:
        loads = {name: with_bursts(load) for name, load in loads.items()}
    comparison = Comparison(loads, given.days, given.start_up)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    runs = {}
    for name, run in comparison.runs(given.only):
        runs[name] = run
        print(line(name, run, given.days, None), flush=True)
    oracle = next((_cost(run) for name, run in runs.items() if name.startswith("oracle:")), None)
    if oracle is not None:
        print()
        for name, run in runs.items():
            print(line(name, run, given.days, oracle))
