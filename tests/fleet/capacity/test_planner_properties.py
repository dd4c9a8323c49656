"""For any load: no more machines than exist, no cell before its start-up, and uncovered load is reported."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.capacity.planning.planner import Program, Solution, plan_capacity, solve
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
)
from tests.fleet.capacity.views import AT, EAST, WEST

SLOTS = 8
TYPES = ("p5", "trn1")
UNHURRIED = CapacitySettings(whole_s=60.0, solve_s=60.0)
amounts = st.floats(0, 200).map(lambda value: round(value, 1))


def no_solver(program: Program, **limits: Any) -> Solution:
    return Solution(None, "there is none")


@st.composite
def demands(draw: st.DrawFn) -> Demand | None:
    if draw(st.integers(0, 5)) == 0:
        return None
    p50 = draw(st.lists(amounts, min_size=SLOTS, max_size=SLOTS))
    beyond = draw(st.lists(st.floats(1, 2), min_size=SLOTS, max_size=SLOTS))
    return Demand(tuple(p50), tuple(value * factor for value, factor in zip(p50, beyond, strict=True)))


@st.composite
def deployments(draw: st.DrawFn, name: str) -> PlannedDeployment:
    types = draw(st.sets(st.sampled_from(TYPES), min_size=1).map(sorted))
    kinds = [CellKind(one, draw(st.sampled_from([8.0, 10.0, 40.0])), draw(st.integers(1, 3))) for one in types]
    places = []
    for region in draw(st.sets(st.sampled_from([EAST, WEST]), min_size=1).map(sorted)):
        least = draw(st.integers(0, 3))
        cells = {one: draw(st.integers(0, 6)) for one in types}
        work = draw(st.lists(st.builds(BatchWork, st.floats(0, 1e5), st.floats(60, 9000)), max_size=2))
        most = least + draw(st.integers(0, 40))
        places.append(PlannedPlace(region, least, most, cells, draw(demands()), tuple(work)))
    start_up_s = draw(st.sampled_from([60.0, 600.0, 900.0, 1500.0]))
    return PlannedDeployment(name, start_up_s, tuple(kinds), tuple(places), priority=draw(st.integers(0, 9)))


@st.composite
def views(draw: st.DrawFn) -> CapacityView:
    pools = [
        MachinePool(region, one, name, draw(st.integers(0, 60)), draw(st.sampled_from([0.0, 3.0, 20.0])))
        for region in (EAST, WEST)
        for one in TYPES
        for name in ("owned", "on_demand")
    ]
    found = tuple(draw(deployments(name)) for name in ("a", "b", "c")[: draw(st.integers(1, 3))])
    return CapacityView(AT, found, tuple(pools), slots=SLOTS)


def check(view: CapacityView, plan: CapacityPlan) -> None:
    used: dict[tuple[str, str], Any] = {}
    for one in view.deployments:
        for place in one.places:
            rows = {
                row.instance_type: row for row in plan.cells if (row.deployment, row.region) == (one.name, place.region)
            }
            total = np.zeros(SLOTS)
            for kind in one.kinds:
                cells = np.array(rows[kind.instance_type].cells)
                now = place.cells.get(kind.instance_type, 0)
                total += cells
                assert cells.min() >= 0
                soon = int(-(-one.start_up_s // view.slot_s))
                assert cells[:soon].max(initial=0) <= now
                key = (place.region, kind.instance_type)
                used[key] = used.get(key, 0) + cells * kind.nodes
            assert total.max() <= max(place.most, sum(place.cells.values()))
    for (region, instance_type), row in used.items():
        here = [pool.count for pool in view.pools if (pool.region, pool.instance_type) == (region, instance_type)]
        assert row.max() <= sum(here)
    for machines in plan.machines:
        pool = next(
            one
            for one in view.pools
            if (one.region, one.instance_type, one.name) == (machines.region, machines.instance_type, machines.pool)
        )
        assert min(machines.machines) >= 0
        assert max(machines.machines) <= pool.count
    assert min(plan.dollars) >= 0
    for budget in plan.budgets:
        assert min(budget.requests) >= 0
        assert all(due <= free + 0.02 for due, free in zip(budget.due, budget.requests, strict=True))


@pytest.mark.slow
@given(views())
@settings(max_examples=settings().max_examples // 3)
def test_no_plan_breaks_what_there_is(view: CapacityView) -> None:
    for solver in (solve, no_solver):
        plan = plan_capacity(view, UNHURRIED, solver)
        check(view, plan)
        assert plan == plan_capacity(view, UNHURRIED, solver)


@pytest.mark.slow
@given(views())
def test_what_has_machines_and_time_is_covered_without_a_word(view: CapacityView) -> None:
    """With unlimited machines and ranges, only load within the start-up is uncovered."""
    pools = tuple(MachinePool(region, one, "all", 100_000, 5.0) for region in (EAST, WEST) for one in TYPES)
    places = [
        PlannedDeployment(
            one.name,
            one.start_up_s,
            one.kinds,
            tuple(PlannedPlace(place.region, place.least, 10_000, place.cells, place.demand) for place in one.places),
        )
        for one in view.deployments
    ]
    for solver in (solve, no_solver):
        plan = plan_capacity(CapacityView(AT, tuple(places), pools, slots=SLOTS), solver=solver)
        assert all(lack.reason.startswith("a cell ordered now") for lack in plan.lacks)
