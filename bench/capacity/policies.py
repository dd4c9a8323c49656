"""What is compared over recorded weeks: a plan by somebody's expectations, the autoscaler that takes it as a need, a
schedule; and the batches that come every evening, whoever scales."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from bench.capacity.autoscaling import DAY_S, NODES
from bench.capacity.demand import REGION
from fleet.planning.autoscaling.view import PlannedNeed, ScaledPlace
from fleet.planning.capacity.need import need_within, place_plan
from fleet.planning.capacity.planner import plan_capacity
from fleet.planning.capacity.view import (
    BatchWork,
    CapacityPlan,
    CapacitySettings,
    CapacityView,
    CellKind,
    Demand,
    MachinePool,
    PlannedDeployment,
    PlannedPlace,
)
from fleet.planning.forecast.series import SLOT_S
from fleet.planning.snapshot import FleetView, PlannedPlaceCells
from simulator.clock import EPOCH
from simulator.fleet_spec import KIND
from simulator.load_replay import PolicyScaler

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
    """Every evening a batch for each deployment. It takes what real-time work leaves free of cells, whoever scales."""

    daily: Mapping[str, float]
    left: dict[str, float] = field(default_factory=dict)
    due_s: float = 0.0
    given: float = 0.0
    missed: float = 0.0
    done: float = 0.0

    def at(self, now_s: float) -> None:
        """What ends and begins at this look."""
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
    """Plans every 15 minutes by what somebody expects, and says what the autoscaler is to have of it."""

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
    """Windows of the hours of a day, as somebody sets them who looks at the first half: the most of each hour."""

    cells: tuple[int, ...]

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        ahead = now + timedelta(seconds=START_UP_S)
        return max(self.cells[now.hour], self.cells[ahead.hour])
