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
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import numpy as np

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
from fleet.autoscaling.planning.needs import PlannedNeed, ScaledPlace
from fleet.autoscaling.planning.policy import CellRange, parse_scaling_policy
from fleet.capacity.planning.forecast import calibrate, forecast_series, past_of
from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, SLOT_S, SLOTS, Calibration, Record, SeriesKey
from fleet.capacity.planning.planner import plan_capacity
from fleet.capacity.planning.view import (
    BatchWork,
    CapacityPlan,
    CapacitySettings,
    CapacityView,
    CellKind,
    Demand,
    MachinePool,
    PlannedDeployment,
    PlannedPlace,
    need_within,
    place_plan,
)
from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.snapshot import FleetView, PlannedPlaceCells
from simulator.clock import EPOCH
from simulator.context import VersionBehaviour
from simulator.fleet_spec import KIND, DeploymentSpec, FleetSpec, build_fleet
from simulator.load_replay import Course, LoadReplay, PolicyScaler, Scaler, Serving
from simulator.world import World

REGION = "east"


def forecasts(loads: Mapping[str, Load], seconds: float) -> dict[str, list[Demand | None]]:
    """Forecasts of each series every 15 minutes by the live forecaster, with its ledger renewed once an hour, from the
    load up to that time alone. None where its quantiles rest on no errors yet."""
    found: dict[str, list[Demand | None]] = {}
    for name, load in loads.items():
        key = SeriesKey(name, REGION, "realtime")
        slots = np.array(
            [mean_rate(load, at, HISTORY_SLOT_S) * SERVICE_S for at in np.arange(0.0, seconds, HISTORY_SLOT_S)]
        )
        calibration, records = Calibration(), list[Record]()
        rows: list[Demand | None] = []
        for at in range(0, int(seconds), SLOT_S):
            past = past_of(key, EPOCH + timedelta(seconds=at), slots[: at // HISTORY_SLOT_S])
            if at and at % 3600 == 0:
                calibration = calibrate(past, records, calibration)
            made = forecast_series(past, calibration) if at >= 2 * SLOT_S else None
            if made and at % 1800 == 0:
                records.append(made.record)
            rows.append(Demand(made.forecast.p50, made.forecast.p90) if made and made.is_judged else None)
        found[name] = rows
    return found


def perfect(load: Load, seconds: float) -> Callable[[float], Demand]:
    """Returns the coming load as the mean of each slot."""
    means = [mean_rate(load, at, SLOT_S) * SERVICE_S for at in range(0, int(seconds + DAY_S), SLOT_S)]

    def known(now_s: float) -> Demand:
        row = tuple(means[int(now_s // SLOT_S) :][:SLOTS])
        return Demand(row, row)

    return known


def mean_rate(load: Load, begins_s: float, lasts_s: float) -> float:
    return sum(load.rate(begins_s + lasts_s * (part + 0.5) / 5) for part in range(5)) / 5


PEAK_CELLS = 20
"""Of each at its peak: the shapes count, not the sizes."""
TARGET = 0.76
"""1 / 1.3: 30 % head-room. No policy here may be fuller or emptier by design."""
PRICE = 21.5
"""US dollars an hour of a machine: trn1.32xlarge on demand."""
FILL = 0.9
TOKENS = 1700
"""Of a line of a batch: 1,500 read and 200 written."""
BATCH_AT_S = 20 * 3600.0
BATCH_WITHIN_S = 12 * 3600.0
BATCH_SHARE = 0.3
"""Of a day's real-time work, due in the twelve hours of the night."""
START_UP_S = 240.0
LOOK_S = 30.0
PARTS = CapacitySettings(whole_most=0)
"""No whole numbers in the first slots: they cost five times the time, over thousands of plans."""


@dataclass
class Batches:
    """Every evening a batch for each deployment. It uses the capacity that real-time work leaves free."""

    daily: Mapping[str, float]
    left: dict[str, float] = field(default_factory=dict)
    due_s: float = 0.0
    given: float = 0.0
    missed: float = 0.0
    done: float = 0.0

    def at(self, now_s: float) -> None:
        if self.left and now_s >= self.due_s:
            self.missed += sum(self.left.values())
            self.left = {}
        if now_s % DAY_S == BATCH_AT_S:
            self.left, self.due_s = dict(self.daily), now_s + BATCH_WITHIN_S
            self.given += sum(self.daily.values())

    def serve(self, name: str, free: float, seconds: float) -> None:
        took = min(self.left.get(name, 0.0), max(free, 0.0) * seconds)
        if took:
            self.left[name] -= took
            self.done += took

    def work(self, name: str, now_s: float) -> tuple[BatchWork, ...]:
        left = self.left.get(name, 0.0)
        return (BatchWork(left, self.due_s - now_s),) if left > 1.0 else ()


@dataclass
class Planner:
    """Plans every 15 minutes by a forecast, and returns the cells that the plan asks of the autoscaler."""

    expected: Callable[[str, float], Demand | None]
    per_cell: Mapping[str, float]
    start_up_s: float
    batches: Batches
    machines: int
    cells: dict[str, int] = field(default_factory=dict)
    plan: CapacityPlan | None = None
    took_s: float = 0.0
    plans: int = 0

    def need(self, name: str, now: datetime) -> PlannedNeed | None:
        now_s = (now - EPOCH).total_seconds()
        if self.plan is None or (now - self.plan.at).total_seconds() >= SLOT_S:
            self.plan = self._plan(now, now_s)
        found = place_plan(self.plan, name, REGION)
        return need_within(found, now, self.start_up_s) if found else None

    def seen(self, fleet: FleetView) -> FleetView:
        """The fleet with the plan's cells, for machines that are launched ahead."""
        if self.plan is None:
            return fleet
        found = tuple(
            PlannedPlaceCells(row.deployment, row.region, self.plan.at, SLOT_S, row.cells, self.start_up_s)
            for row in self.plan.cells
            if any(one.deployment == row.deployment for one in self.plan.budgets)
        )
        return replace(fleet, planned=found)

    def _plan(self, now: datetime, now_s: float) -> CapacityPlan:
        began = time.process_time()
        deployments = []
        for name in self.per_cell:
            here = PlannedPlace(
                REGION, 1, 3 * PEAK_CELLS, {KIND: self.cells[name]}, self.expected(name, now_s),
                self.batches.work(name, now_s),
            )  # fmt: skip
            kinds = (CellKind(KIND, self.per_cell[name], NODES),)
            deployments.append(PlannedDeployment(name, self.start_up_s, kinds, (here,), TARGET))
        pools = (MachinePool(REGION, KIND, "on_demand", self.machines, PRICE),)
        plan = plan_capacity(CapacityView(now, tuple(deployments), pools), PARTS)
        self.took_s += time.process_time() - began
        self.plans += 1
        return plan


@dataclass
class Planned:
    """The autoscaler with the plan's need; or, `alone`, what the plan has for a slot and nothing else."""

    name: str
    planner: Planner
    policy: PolicyScaler
    alone: bool = False

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        self.planner.cells[self.name] = place.current
        if not self.alone:
            return self.policy.wanted(place, now)
        need = self.planner.need(self.name, now)
        return place.current if need is None else place.range.clamped(need.cells)


@dataclass
class Schedule:
    """Windows of the hours of a day, as an operator sets them from the first half: the maximum of each hour."""

    cells: tuple[int, ...]

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        ahead = now + timedelta(seconds=START_UP_S)
        return max(self.cells[now.hour], self.cells[ahead.hour])


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

    def serve_batches() -> None:
        batches.at(world.queue.now_s)
        for name, seen in replays.items():
            ready = world.ready[name, REGION]
            batches.serve(name, FILL * ready * per_cell[name] - seen.working, LOOK_S)
        world.queue.after(LOOK_S, serve_batches)

    world.queue.at(0.0, serve_batches)
    world.run_until(seconds)
    courses = {name: seen.course for name, seen in replays.items()}
    return Run(courses, batches, planner, time.process_time() - began)


class Comparison:
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
