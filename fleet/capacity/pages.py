"""The page of the day plan: cells, load, batch budgets, dollars, orders and lacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.dashboard.charts import MOST_SERIES, Chart, Series
from controlplane.dashboard.events import marked
from fleet.autoscaling.selectors import newest_plan, planned_place_cells, scaling_switch
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.capacity.planning.view import FRESH_S
from fleet.reconcile.selectors.snapshot import spares_by_plan

ROWS_SHOWN = 60
ALL_OTHERS = "all others"


@dataclass(frozen=True, slots=True)
class PlanRow:
    at: datetime
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WarmMachines:
    region: str
    instance_type: str
    machines: int
    reason: str


@dataclass(frozen=True, slots=True)
class DayPlanView:
    """`plan` None: no plan yet. `is_old`: the plan has expired. `acting`: deployments whose autoscaler follows it;
    `is_paused`: none does."""

    plan: DayPlan | None
    is_old: bool = False
    charts: tuple[Chart, ...] = ()
    orders: tuple[PlanRow, ...] = ()
    lacks: tuple[PlanRow, ...] = ()
    warm: tuple[WarmMachines, ...] = ()
    acting: tuple[str, ...] = ()
    is_paused: bool = False

    @property
    def per_hour(self) -> float:
        """US dollars an hour, as the mean of the day."""
        hours = len(self.plan.dollars) * self.plan.slot_s / 3600.0 if self.plan else 0.0
        return self.plan.total / hours if self.plan and hours else 0.0


def day_plan_view(*, deployment: str, region: str, now: datetime) -> DayPlanView:
    """Filtered by deployment and region, if given. Dollars are always those of the whole fleet."""
    plan = newest_plan()
    if plan is None:
        return DayPlanView(None)
    places = plan.places.all()
    if deployment:
        places = places.filter(deployment=deployment)
    if region:
        places = places.filter(region=region)
    wanted = {"deployment": deployment, "region": region}
    return DayPlanView(
        plan,
        is_old=(now - plan.at).total_seconds() >= FRESH_S,
        charts=marked(_charts(plan, list(places), region), deployment=deployment, region=region),
        orders=_plan_rows(plan, plan.orders, wanted),
        lacks=_plan_rows(plan, plan.lacks, wanted),
        warm=tuple(
            WarmMachines(where, kind, spares.count, spares.reason)
            for (where, kind), spares in spares_by_plan(now).items()
            if region in ("", where)
        ),
        acting=tuple(sorted({one.deployment for one in planned_place_cells()})),
        is_paused=scaling_switch().paused,
    )


def _plan_rows(plan: DayPlan, rows: Sequence[dict[str, Any]], wanted: dict[str, str]) -> tuple[PlanRow, ...]:
    found = [row for row in rows if all(not value or row[name] == value for name, value in wanted.items())]
    return tuple(PlanRow(plan.at + timedelta(seconds=row["at_s"]), row) for row in found[:ROWS_SHOWN])


def _charts(plan: DayPlan, places: Sequence[DayPlanPlace], region: str) -> tuple[Chart, ...]:
    loads = (("expected", "expected"), ("to cover", "cover"), ("for batches", "budget"), ("due", "due"))
    price = tuple(dollars * 3600.0 / plan.slot_s for dollars in plan.dollars)
    pools = _machines(plan, region)
    return (
        Chart("planned-cells", "Cells", "cells", plan.at, plan.slot_s, _cells(places), decimals=0),
        Chart(
            "planned-load",
            "Load and batches",
            "concurrent requests",
            plan.at,
            plan.slot_s,
            tuple(Series(label, _sum([getattr(place, name) for place in places])) for label, name in loads),
        ),
        Chart("planned-machines", "Machines by pool", "machines", plan.at, plan.slot_s, pools, decimals=0),
        Chart("planned-cost", "Cost of the fleet", "$/h", plan.at, plan.slot_s, (Series("cost", price),), decimals=2),
    )


def _cells(places: Sequence[DayPlanPlace]) -> tuple[Series, ...]:
    """By deployment, largest first; by region for one deployment."""
    names = {place.deployment_id for place in places}
    by_name: dict[str, list[Sequence[float]]] = {}
    for place in places:
        by_name.setdefault(place.deployment_id if len(names) > 1 else place.region_id, []).append(place.cells)
    return _greatest(by_name)


def _machines(plan: DayPlan, region: str) -> tuple[Series, ...]:
    by_name: dict[str, list[Sequence[float]]] = {}
    for row in plan.machines:
        if region in ("", row["region"]):
            by_name.setdefault(f"{row['pool']} in {row['region']}", []).append(row["machines"])
    return _greatest(by_name)


def _greatest(by_name: Mapping[str, list[Sequence[float]]]) -> tuple[Series, ...]:
    ranked = sorted(by_name, key=lambda name: (-sum(map(sum, by_name[name])), name))
    most = MOST_SERIES if len(ranked) <= MOST_SERIES else MOST_SERIES - 1
    shown = [Series(name, _sum(by_name[name])) for name in ranked[:most]]
    if rest := [row for name in ranked[most:] for row in by_name[name]]:
        shown.append(Series(ALL_OTHERS, _sum(rest)))
    return tuple(shown)


def _sum(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Places without a forecast have no budget."""
    slots = max((len(row) for row in rows), default=0)
    return tuple(sum(row[slot] for row in rows if row) for slot in range(slots))
