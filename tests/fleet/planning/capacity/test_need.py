"""What the autoscaler and batches take from a plan."""

from dataclasses import replace
from datetime import timedelta

import pytest

from fleet.planning.capacity.need import PlacePlan, at_load, batch_seconds, batch_time_s, need_within, place_plan
from fleet.planning.capacity.planner import plan_capacity
from tests.fleet.planning.capacity.views import AT, EAST, view

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
        "from 12:30 UTC on 10.0 requests at once are expected and 14.0 to be covered, and batches that are due take 2.5"
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
