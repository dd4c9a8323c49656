"""Decides how many cells each deployment should have where, on what and when over a day, which machines that takes, and
what batches may have of it. Pure.

Region by region, for they share no machines: a linear program over the day, rounded up and repaired; where that is
quick, whole numbers in the first slots; and without a solver's answer a greedy plan. What a region has no machines for
is planned in another one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fleet.planning.capacity.arrays import Array, Arrays, arrays_of
from fleet.planning.capacity.greedy import greedy_cells, topped_up
from fleet.planning.capacity.orders import orders_of
from fleet.planning.capacity.outcome import (
    RegionPlan,
    budgets,
    dollars,
    lacks,
    loads,
    machines,
    planned_cells,
    spare_cells,
    starts,
    unserved,
)
from fleet.planning.capacity.program import Program, columns_of, program_of
from fleet.planning.capacity.rounding import bounded, dear_first, whole_cells
from fleet.planning.capacity.view import (
    CapacityPlan,
    CapacitySettings,
    CapacityView,
    Demand,
    PlannedDeployment,
)

if TYPE_CHECKING:
    import highspy


# Solves a program with HiGHS, on one thread, so that the same program has the same solution.
# HiGHS reads a clock for its time limit. A solution that is not proved by then is thrown away, so the limit decides
# between two plans that are each always the same.

GAP = 1e-3
"""A solution in whole numbers within a thousandth of the optimum will do."""


@dataclass(frozen=True)
class Solution:
    """`values` None: there is none, for the reason in `why`."""

    values: Array | None
    why: str = ""


def solve(program: Program, *, limit_s: float, whole: bool = False) -> Solution:
    """The least of a program; with `whole` its whole columns are whole numbers."""
    try:
        import highspy
    except ImportError as error:
        return Solution(None, f"highspy cannot be imported: {error}")
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "time_limit": limit_s, "mip_rel_gap": GAP}
    for option, value in options.items():
        highs.setOptionValue(option, value)
    highs.passModel(_model(program, whole))
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return Solution(None, f"HiGHS answered within {limit_s:g} s: {highs.modelStatusToString(status)}")
    return Solution(np.array(highs.getSolution().col_value))


def _model(program: Program, whole: bool) -> "highspy.HighsLp":
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = (
        program.starts, program.columns, program.values
    )  # fmt: skip
    if whole:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[int(is_whole)] for is_whole in program.whole]
    return model


SETTINGS = CapacitySettings()
Solver = Callable[..., Solution]
WAYS = ("greedy", "lp", "whole")


def plan_capacity(view: CapacityView, settings: CapacitySettings = SETTINGS, solver: Solver = solve) -> CapacityPlan:
    """The plan of a view.

    Raises:
        ValueError: the view makes no sense; the text says which part of it.
    """
    regions = {place.region for one in view.deployments for place in one.places}
    plans = {region: _plan(_of_region(view, region), settings, solver, len(regions)) for region in sorted(regions)}
    for region, moved in _elsewhere(plans).items():
        plans[region] = _plan(moved, settings, solver, len(regions))
    found = [plans[region] for region in sorted(plans)]
    worst = min(found, key=lambda one: WAYS.index(one.solver), default=None)
    return CapacityPlan(
        at=view.at,
        slot_s=view.slot_s,
        solver=worst.solver if worst else WAYS[-1],
        why=worst.why if worst else "",
        cells=tuple(row for plan in found for row in planned_cells(plan)),
        loads=tuple(row for plan in found for row in loads(plan)),
        budgets=tuple(row for plan in found for row in budgets(plan)),
        machines=tuple(row for plan in found for row in machines(plan)),
        orders=tuple(orders_of(found)),
        lacks=tuple(row for plan in found for row in lacks(plan)),
        dollars=tuple(round(float(slot), 4) for slot in sum((dollars(plan) for plan in found), np.zeros(view.slots))),
        shifts=sum(starts(plan) for plan in found),
        settings=settings,
    )


def _of_region(view: CapacityView, region: str) -> CapacityView:
    here = (
        replace(one, places=tuple(place for place in one.places if place.region == region)) for one in view.deployments
    )
    pools = tuple(pool for pool in view.pools if pool.region == region)
    return replace(view, deployments=tuple(one for one in here if one.places), pools=pools)


def _plan(view: CapacityView, settings: CapacitySettings, solver: Solver, regions: int) -> RegionPlan:
    """Limits are shared evenly by regions, so that all of them keep the whole."""
    arrays = arrays_of(view, settings)
    program = program_of(arrays)
    found = solver(program, limit_s=settings.solve_s / regions)
    if found.values is None:
        return RegionPlan(arrays, bounded(arrays, greedy_cells(arrays)), "greedy", found.why)
    if len(program.cost) > settings.whole_most:
        why = f"{len(program.cost)} variables are too many for whole numbers"
        return RegionPlan(arrays, _rounded(arrays, found), "lp", why)
    whole = solver(program, limit_s=settings.whole_s / regions, whole=True)
    if whole.values is None:
        return RegionPlan(arrays, _rounded(arrays, found), "lp", whole.why)
    return RegionPlan(arrays, _rounded(arrays, whole), "whole", "")


def _rounded(arrays: Arrays, found: Solution) -> Array:
    columns = columns_of(arrays)
    values: Array = found.values
    cells = whole_cells(arrays, values[columns.cells], values[columns.batch])
    return bounded(arrays, topped_up(arrays, cells))


def _elsewhere(plans: Mapping[str, RegionPlan]) -> dict[str, CapacityView]:
    """Regions that are to cover what others have no machines for, as views with that as well, and those others without
    it: as far as there are machines that nobody else needs, the cheapest first."""
    moved: dict[str, CapacityView] = {}
    for region, plan in plans.items():
        missing = unserved(plan)
        for at in np.flatnonzero(missing.max(axis=1, initial=0.0) > 1e-3):
            one, _ = plan.arrays.places[at]
            for other, row in _helpers(plans, one.name, region):
                share = np.minimum(missing[at], row)
                if share.max(initial=0.0) > 1e-3:
                    missing[at] -= share
                    for place, sign in ((other, 1.0), (region, -1.0)):
                        view = moved.get(place, plans[place].arrays.view)
                        moved[place] = _with_demand(view, one.name, sign * share)
    return moved


def _helpers(plans: Mapping[str, RegionPlan], deployment: str, without: str) -> Iterator[tuple[str, Array]]:
    """Other regions of a deployment with the requests at once [t] that they could serve, the cheapest first."""
    found = []
    for region, plan in plans.items():
        arrays = plan.arrays
        for at, (one, place) in enumerate(arrays.places):
            if region != without and one.name == deployment and place.demand is not None:
                kind = dear_first(arrays, arrays.kinds_of(at))[-1]
                soon = np.arange(arrays.view.slots) < arrays.lag[kind]
                room = np.where(soon, 0.0, spare_cells(plan, at, kind) * arrays.useful[kind])
                found.append((float(arrays.hour[arrays.group_of[kind]] * arrays.nodes[kind]), region, room))
    for _, region, room in sorted(found, key=lambda one: one[:2]):
        yield region, room


def _with_demand(view: CapacityView, deployment: str, more: Array) -> CapacityView:
    return replace(view, deployments=tuple(_changed(one, deployment, more) for one in view.deployments))


def _changed(one: PlannedDeployment, deployment: str, more: Array) -> PlannedDeployment:
    if one.name != deployment:
        return one
    return replace(one, places=tuple(replace(place, demand=_sum(place.demand, more)) for place in one.places))


def _sum(demand: Demand | None, more: Array) -> Demand | None:
    if demand is None:
        return None
    p50, p90 = (np.maximum(np.array(row[: len(more)]) + more, 0.0) for row in (demand.p50, demand.p90))
    return Demand(tuple(map(float, p50)), tuple(map(float, p90)))
