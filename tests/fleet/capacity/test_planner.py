"""Day plans with and without the solver, and what the autoscaler and batches take from them."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.planner import Program, Solution, plan_capacity, solve
from fleet.capacity.planning.view import (
    BatchWork,
    CapacityPlan,
    CapacitySettings,
    CapacityView,
    CellKind,
    PlacePlan,
    at_load,
    batch_seconds,
    batch_time_s,
    need_within,
    place_plan,
    within_budget,
)
from tests.fleet.capacity.views import (
    AT,
    EAST,
    WEST,
    budget,
    cells,
    deployment,
    flat,
    machines,
    place,
    pool,
    steps,
    view,
    wave,
)

HOUR = 4


def no_solver(program: Program, **limits: Any) -> Solution:
    return Solution(None, "there is none")


@pytest.fixture(params=[solve, no_solver], ids=["solver", "greedy"])
def plan(request: pytest.FixtureRequest) -> Callable[..., CapacityPlan]:
    def planned(seen: CapacityView, settings: CapacitySettings = CapacitySettings()) -> CapacityPlan:  # noqa: B008
        return plan_capacity(seen, settings, solver=request.param)

    return planned


Plan = Callable[[CapacityView], CapacityPlan]


def test_cells_follow_what_is_expected(plan: Plan) -> None:
    found = plan(view(deployment("chat", place(demand=wave(5.0, 50.0)))))
    assert (cells(found)[0], max(cells(found))) == (1, 10)
    assert cells(found)[-1] == 2  # 5.05 requests
    assert not found.lacks


def test_a_quantile_is_covered_and_what_is_expected_is_left_to_batches_around_it(plan: Plan) -> None:
    demand = wave(20.0, 20.0, beyond=2.7)
    found = plan(view(deployment("chat", place(demand=demand, cells={"trn1": 6}))))
    assert set(cells(found)) == {6}  # 54 requests at 9 each; the expected load needs 4 at 5 each
    assert set(budget(found)) == {6 * 9.0 - 20.0}  # 90 % of 10 each, without the 20 that are expected


def test_a_quantile_that_the_head_room_of_the_target_has_room_for_buys_nothing(plan: Plan) -> None:
    demand = wave(20.0, 20.0, beyond=1.8)
    found = plan(view(deployment("chat", place(demand=demand, cells={"trn1": 4}))))
    assert set(cells(found)) == {4}
    full = plan(view(deployment("chat", place(demand=demand, cells={"trn1": 4}), target=0.9)))
    assert set(cells(full)) == {4}, "36 requests at 9 each: a target beyond it has none"


def test_no_cell_serves_before_it_can_have_started(plan: Plan) -> None:
    found = plan(view(deployment("chat", place(demand=flat(50.0)), start_up_s=1800.0)))
    assert cells(found)[:3] == (2, 2, 10)
    (lack,) = found.lacks
    assert (lack.what, lack.at_s, lack.requests, lack.lasts_s) == ("realtime", 0.0, 40.0, 1800)
    assert lack.reason == "a cell ordered now serves in 1800 s"
    (start,) = (order for order in found.orders if order.kind == "start")
    assert (start.at_s, start.count) == (0.0, 8)
    assert start.dollars == pytest.approx(8 * (10.0 + 5.0))  # an hour, and half an hour until they serve


def test_batches_take_the_night_and_no_cell_more(plan: Plan) -> None:
    night = wave(5.0, 100.0, peak_h=0.0)
    alone = view(deployment("chat", place(demand=night, cells={"trn1": 20})))
    work = BatchWork(100 * 3600.0, 20 * 3600.0)
    found = plan(view(deployment("chat", place(demand=night, cells={"trn1": 20}, batch=(work,)))))
    assert found.total == pytest.approx(plan(alone).total)
    (row,) = found.budgets
    assert sum(row.due) * 900 == pytest.approx(100 * 3600.0, rel=0.01)
    assert not found.lacks


def test_batches_that_are_due_get_cells_where_nothing_is_free(plan: Plan) -> None:
    work = BatchWork(100 * 3600.0, 4 * 3600.0)
    found = plan(view(deployment("chat", place(demand=flat(5.0), batch=(work,)))))
    assert sum(budget(found)[: 4 * HOUR]) * 900 >= 100 * 3600.0
    assert not found.lacks
    assert max(cells(found)[4 * HOUR :]) == 1


def test_cells_for_batches_come_in_the_cheap_hours() -> None:
    work = BatchWork(90 * 3600.0, 10 * 3600.0)
    block = pool("block", 20, 1.0, from_s=4 * 3600.0, until_s=8 * 3600.0)
    found = plan_capacity(view(deployment("chat", place(demand=flat(5.0), batch=(work,))), pools=(pool(), block)))
    row = cells(found)
    assert min(row[4 * HOUR + 1 : 8 * HOUR - 1]) > 1
    assert max(row[: 4 * HOUR - 1]) <= 2
    assert max(machines(found, "block")[: 4 * HOUR - 1]) == 0
    assert max(machines(found, "block")[8 * HOUR :]) == 0


def test_work_that_finds_no_room_is_told_with_its_time(plan: Plan) -> None:
    work = BatchWork(1000 * 3600.0, 3600.0)
    found = plan(view(deployment("chat", place(demand=flat(5.0), batch=(work,))), pools=(pool(count=4),)))
    (lack,) = found.lacks
    assert (lack.what, lack.at_s) == ("batch", 3600.0)
    assert lack.reason.endswith("of the work due then has no room; us-east-1 has 4 machines of trn1 then, all in use")


def test_the_cheapest_machines_are_used_first(plan: Plan) -> None:
    pools = (pool("on_demand", 100, 10.0), pool("spot", 3, 4.0), pool("owned", 2, 0.0, now=2))
    found = plan(view(deployment("chat", place(demand=flat(50.0), cells={"trn1": 10})), pools=pools))
    assert [machines(found, name)[5] for name in ("owned", "spot", "on_demand")] == [2, 3, 5]
    assert found.dollars[5] == pytest.approx((3 * 4.0 + 5 * 10.0) / 4)


def test_who_is_more_important_has_the_machines_that_are_short(plan: Plan) -> None:
    important = deployment("chat", place(demand=flat(25.0), cells={"trn1": 5}), priority=7)
    other = deployment("spare-time", place(demand=flat(25.0), cells={"trn1": 5}))
    found = plan(view(other, important, pools=(pool(count=6),)))
    assert set(cells(found)) == {5}
    assert set(cells(found, "spare-time")) == {1}
    (lack,) = found.lacks
    assert lack.deployment == "spare-time"
    assert lack.reason == "us-east-1 has 6 machines of trn1 then, all in use"


def test_nodes_move_where_one_deployments_night_is_anothers_day(plan: Plan) -> None:
    asia = deployment("asia", place(demand=steps(40.0, 20.0, at=4), cells={"trn1": 8}))
    europe = deployment("europe", place(demand=steps(20.0, 40.0, at=4), cells={"trn1": 4}))
    found = plan(view(asia, europe, pools=(pool(count=20, now=12),)))
    (move,) = (order for order in found.orders if order.kind == "move")
    assert (move.deployment, move.count, move.taken_from) == ("europe", 4, "asia in us-east-1 on trn1")
    assert move.at_s == 3600.0 - 600.0
    assert move.dollars == pytest.approx(4 * 10.0 / 6, abs=1e-4)  # ten minutes until they serve
    assert move.reason == (
        "40.0 concurrent requests are expected; 8 cells must cover 40.0; "
        "asia in us-east-1: 20.0 concurrent requests are expected; 4 cells must cover 20.0"
    )


def test_what_a_region_has_no_machines_for_is_planned_in_another(plan: Plan) -> None:
    chat = deployment("chat", place(EAST, flat(50.0)), place(WEST, flat(5.0)))
    pools = (pool(count=4), pool(region=WEST, count=20))
    found = plan(view(chat, pools=pools))
    assert cells(found)[4] == 4
    assert cells(found, region=WEST)[4] == 7  # 5 own ones and 30 that do not fit
    assert {(lack.region, lack.lasts_s) for lack in found.lacks} == {(EAST, 900)}  # until they have started


def test_a_load_that_nobody_forecasts_keeps_what_it_has(plan: Plan) -> None:
    found = plan(view(deployment("chat", place(demand=None, cells={"trn1": 3}, batch=(BatchWork(1e6, 3600.0),)))))
    assert set(cells(found)) == {3}
    assert not found.budgets


def test_ranges_hold(plan: Plan) -> None:
    found = plan(view(deployment("chat", place(demand=flat(50.0), least=3, most=6))))
    assert max(cells(found)) == 6
    assert found.lacks[0].reason in ("its range ends at 6", "a cell ordered now serves in 600 s")
    assert set(cells(plan(view(deployment("chat", place(demand=flat(0.0), least=3, most=6)))))[1:]) == {3}


def test_the_dearer_of_two_types_comes_last(plan: Plan) -> None:
    kinds = (CellKind("trn1", 10.0), CellKind("p5", 40.0))
    pools = (pool(count=4), pool(instance_type="p5", price=100.0))
    found = plan(view(deployment("chat", place(demand=flat(30.0), cells={"trn1": 2}), kinds=kinds), pools=pools))
    assert cells(found)[4] == 4
    assert cells(found, instance_type="p5")[4] == 1


def test_a_short_dip_is_held_where_a_start_is_dearer() -> None:
    base = flat(10.0)
    dip = replace(base, **dict.fromkeys(("p50", "p90"), (*base.p50[:20], 5.0, *base.p50[21:])))
    cold = (CellKind("trn1", 10.0, lost_cache=5.0),)
    assert cells(plan_capacity(view(deployment("chat", place(demand=dip)))))[20] == 1
    assert cells(plan_capacity(view(deployment("chat", place(demand=dip), kinds=cold))))[20] == 2


def test_it_says_which_way_it_was_found() -> None:
    assert plan_capacity(view()).solver == "whole"
    large = plan_capacity(view(), CapacitySettings(whole_most=10))
    assert (large.solver, large.why) == ("lp", "480 variables are too many for whole numbers")
    late = plan_capacity(view(), CapacitySettings(solve_s=0.0))
    assert late.solver == "greedy"
    assert "Time limit" in late.why


def test_no_deployment_has_an_empty_plan() -> None:
    found = plan_capacity(replace(view(), deployments=()))
    assert (found.cells, found.total, found.solver) == ((), 0.0, "whole")


def test_a_view_that_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="chat in us-east-1: its forecast has 3 slots; the plan has 96"):
        plan_capacity(view(deployment("chat", place(demand=flat(1.0, slots=3)))))
    with pytest.raises(ValueError, match="chat in us-east-1: 5 to 2 cells are not a range"):
        plan_capacity(view(deployment("chat", place(demand=flat(1.0), least=5, most=2))))


def test_late_work_of_a_batch_is_covered_like_real_time_work_until_a_tenth_of_its_time_is_left() -> None:
    late = place(demand=flat(10.0), batch=(BatchWork(9_000.0 * 9, 10 * 900.0, is_late=True),))
    found = plan_capacity(view(deployment("chat", late)))
    load = found.loads[0]
    assert load.cover[0] == 10.0, "no cell that is ordered now serves yet"
    assert set(load.cover[1:9]) == {10.0 + 9_000.0 * 9 / (8 * 900.0)}
    assert set(load.cover[9:]) == {10.0}
    assert cells(found)[1:9] == (5,) * 8
    assert found.budgets[0].due[1] == 0.0, "it is no guest"


PRICES = {EAST: 10.0, WEST: 20.0}


def mosts(*places: object, budget: float | None) -> list[int]:
    return [one.most for one in within_budget(places, PRICES, budget)]  # type: ignore[arg-type]


def test_what_the_least_of_each_leaves_goes_by_the_greatest_load() -> None:
    east, west = place(demand=flat(30.0)), place(WEST, wave(0.0, 10.0))
    assert mosts(east, west, budget=None) == [50, 50]
    assert mosts(east, west, budget=110.0) == [1 + 6, 1 + 1]
    assert mosts(east, west, budget=5.0) == [1, 1], "what ranges begin with stays"
    assert mosts(east, west, budget=9_000.0) == [50, 50]


def test_what_nobody_forecasts_or_states_the_price_of_is_left_alone() -> None:
    assert mosts(place(), budget=20.0) == [50]
    assert within_budget([place(demand=flat(1.0))], {EAST: 0.0}, 1.0)[0].most == 50


def test_a_plan_keeps_to_it_and_says_what_is_lacking_for_it() -> None:
    bound = within_budget([place(demand=flat(30.0))], PRICES, 40.0)
    plan = plan_capacity(view(deployment("chat", *bound), pools=(pool(),)))
    assert max(plan.cells[0].cells) == 4
    (lack,) = plan.lacks
    assert (lack.requests, lack.reason) == (10.0, "its budget covers 4")


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1000)), min_size=2, max_size=2), st.floats(0, 10_000))
def test_all_places_together_never_cost_more(ranges: list[tuple[int, float]], budget: float) -> None:
    places = [
        place(region, flat(load), least=least) for region, (least, load) in zip((EAST, WEST), ranges, strict=True)
    ]
    found = within_budget(places, PRICES, budget)
    assert all(one.least <= one.most <= 50 for one in found)
    needed = sum(one.least * PRICES[one.region] for one in found)
    if any(load for _, load in ranges):
        assert sum(one.most * PRICES[one.region] for one in found) <= max(budget, needed) + 1e-6


PLAN = PlacePlan(
    AT, 900, (2, 3, 5, 4), (8.0, 9.0, 10.0, 11.0), (12.0, 13.0, 14.0, 15.0), (1.0, 2.0, 3.0, 4.0), (0.0, 0.0, 2.5, 0.0)
)


@pytest.mark.parametrize(
    ("minutes", "start_up_s", "cells"),
    [(0, 0.0, 3), (0, 600.0, 3), (0, 900.0, 5), (14, 100.0, 5), (30, 60.0, 5), (44, 60.0, 5)],
)
def test_the_most_until_a_cell_that_is_ordered_now_has_served_for_a_slot(
    minutes: int, start_up_s: float, cells: int
) -> None:
    need = need_within(PLAN, AT + timedelta(minutes=minutes), start_up_s)
    assert need is not None
    assert need.cells == cells


@pytest.mark.parametrize(("minutes", "enough"), [(0, 9), (20, 9), (30, 7), (44, 7)])
def test_what_is_enough_is_the_most_until_half_an_hour_later(minutes: int, enough: int) -> None:
    long = replace(PLAN, cells=(9, 9, 5, 4, 7, 4), expected=(8.0,) * 6, cover=(12.0,) * 6, budget=(1.0,) * 6, due=())
    need = need_within(long, AT + timedelta(minutes=minutes), 60.0)
    assert need is not None
    assert (need.enough, need.cells) == (enough, {0: 9, 20: 9, 30: 5, 44: 7}[minutes])


def test_it_says_from_when_on_and_what_for() -> None:
    need = need_within(PLAN, AT, 900.0)
    assert need is not None
    assert need.reason == (
        "from 12:30 UTC on 10.0 concurrent requests are expected and 14.0 must be covered, and due batches use 2.5"
    )


def test_an_old_plan_asks_for_nothing() -> None:
    assert need_within(PLAN, AT + timedelta(minutes=45), 60.0) is None
    assert need_within(PLAN, AT - timedelta(seconds=1), 60.0) is None


def test_where_nobody_forecasts_the_load_a_plan_keeps_nobody_from_fewer_cells() -> None:
    assert need_within(replace(PLAN, budget=(), due=()), AT, 60.0) is None


def test_at_another_load_cells_grow_by_what_they_have_room_for() -> None:
    assert at_load(PLAN, 1.0) == PLAN
    double = at_load(PLAN, 2.0)
    assert double.cells == (4, 6, 10, 8), "the third has 14 to be covered and 2.5 that are due"
    assert (double.expected[0], double.cover[0], double.budget, double.due) == (16.0, 24.0, PLAN.budget, PLAN.due)
    assert at_load(PLAN, 0.0).cells == (0, 0, 1, 0), "what is due stays"
    assert at_load(replace(PLAN, due=()), 2.0).cells == (4, 6, 10, 8)


def test_a_place_is_read_out_of_a_plan() -> None:
    found = place_plan(plan_capacity(view()), "chat", EAST)
    assert found is not None
    assert (found.cells[5], found.cover[5], found.budget[5]) == (2, 10.0, 8.0)
    assert place_plan(plan_capacity(view()), "another", EAST) is None


def test_what_batches_may_have_adds_up_over_time_and_goes_on_as_the_day_was() -> None:
    assert batch_seconds(PLAN, AT, 900.0) == 900.0
    assert batch_seconds(PLAN, AT + timedelta(minutes=10), 900.0) == 300 * 1.0 + 600 * 2.0
    assert batch_seconds(PLAN, AT, 7200.0) == 900 * 10.0 + 3600 * 2.5
    assert batch_seconds(PlacePlan(AT, 900, (1,), (1.0,), (1.0,)), AT, 900.0) == 0.0


@pytest.mark.parametrize(
    ("minutes", "work", "seconds"),
    [(0, 900.0, 900.0), (0, 0.0, 0.0), (10, 600.0, 450.0), (0, 9000.0, 3600.0), (0, 9000.0 + 250.0, 3700.0)],
)
def test_how_long_it_takes_until_batches_had_so_much(minutes: int, work: float, seconds: float) -> None:
    assert batch_time_s(PLAN, AT + timedelta(minutes=minutes), work) == pytest.approx(seconds)


def test_where_nothing_is_left_it_takes_for_ever() -> None:
    assert batch_time_s(replace(PLAN, budget=(0.0,) * 4), AT, 1.0) is None
    assert batch_time_s(replace(PLAN, budget=()), AT, 1.0) is None
