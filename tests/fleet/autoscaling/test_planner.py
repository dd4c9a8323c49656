"""Target cells with rule and reason, also for cells of different capacity."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.autoscaling.planning.needs import MetricValue, PlaceLoad, PlannedNeed, ScaledPlace, ScalingRule
from fleet.autoscaling.planning.planner import MAX_CHECK_GAP_S, MAX_SAMPLES, Regret, plan_scaling, regret_after
from fleet.autoscaling.planning.policy import CellRange, CloudMetric, ScalingMode, ScalingPolicy, parse_scaling_policy
from tests.fleet.autoscaling.scaled import ACTING, NOW, agreed, course, decide, place, view


@pytest.mark.parametrize(
    ("load", "wanted", "rule"),
    [
        (PlaceLoad(14.0), 2, ScalingRule.UTILISATION),
        (PlaceLoad(14.1), 3, ScalingRule.UTILISATION),
        (PlaceLoad(70.0), 10, ScalingRule.UTILISATION),
        (PlaceLoad(14.0, queued=56.0), 10, ScalingRule.QUEUE),
        (PlaceLoad(14.0, queued=0.01), 3, ScalingRule.QUEUE),
        (PlaceLoad(20.0, queued=128.0, offered=41.0), 6, ScalingRule.QUEUE),
        (PlaceLoad(20.0, queued=8.0, offered=300.0), 4, ScalingRule.QUEUE),
        (PlaceLoad(20.0, queued=8.0, offered=3.0), 3, ScalingRule.UTILISATION),
        (PlaceLoad(5.0, autopilot=33.0), 5, ScalingRule.AUTOPILOT),
        (PlaceLoad(5.0, forecast=33.0), 5, ScalingRule.FORECAST),
        (PlaceLoad(5.0, forecast=3.0), 2, ScalingRule.AGREEMENT),
        (PlaceLoad(5000.0), 20, ScalingRule.MAX),
        (None, 2, ScalingRule.UNKNOWN_LOAD),
    ],
)
def test_what_asks_for_most_is_wanted_at_once(load: PlaceLoad | None, wanted: int, rule: ScalingRule) -> None:
    decision = decide(view(place(load=load)))
    assert (decision.wanted, decision.rule) == (wanted, rule)


def test_reasons_name_the_numbers() -> None:
    assert decide(view(place(load=PlaceLoad(14.0, 7.0)))).reason == (
        "21.0 concurrent requests, of which 14.0 are in flight and 7.0 wait, need 3 cells at 70% of 10 each"
    )
    assert decide(view(place(load=PlaceLoad(999.0)))).reason == (
        "999.0 concurrent requests need 143 cells at 70% of 10 each; its range ends at 20"
    )
    down = decide(view(place(current=6, load=PlaceLoad(14.0), history=agreed(3))))
    assert (
        down.reason
        == "3 cells would have been enough for 10 min: 14.0 concurrent requests need 2 cells at 70% of 10 each"
    )


def test_a_target_above_what_the_autopilot_gives_is_taken_as_just_below() -> None:
    """At its cap of 50 % a region gets no more requests, and must still count as full."""
    assert decide(view(place(load=PlaceLoad(10.0)), utilisation_cap=0.5)).wanted == 3


def test_there_are_fewer_once_fewer_were_enough_all_the_time() -> None:
    calm = place(current=6, load=PlaceLoad(7.0), history=agreed(2))
    assert decide(view(calm)).wanted == 2
    short = decide(view(replace(calm, history=agreed(2, seconds=590.0))))
    assert (short.wanted, short.rule) == (6, ScalingRule.AGREEMENT)
    assert short.reason.endswith("it keeps 6 cells until fewer were enough for 10 min")
    busier = (*agreed(2)[:-9], replace(agreed(5)[-9], cells=5), *agreed(2)[-8:])
    assert decide(view(replace(calm, history=busier))).wanted == 5
    assert decide(view(calm, start_up_s=400.0)).wanted == 6, "twice the start-up time at least"


def test_a_load_at_the_edge_takes_no_cell_away() -> None:
    """14 concurrent requests need exactly two cells. A cell is removed only once a tenth of the target would be
    free."""
    numbers = [one.wanted for one in course(view(place(current=3)), [PlaceLoad(13.9)] * 300)]
    assert set(numbers) == {3}
    assert course(view(place(current=3)), [PlaceLoad(12.5)] * 300)[-1].wanted == 2


def test_a_gap_in_what_was_seen_begins_the_agreement_anew() -> None:
    calm = place(current=6, load=PlaceLoad(7.0), history=agreed(2)[:-9])
    decision = decide(view(calm))
    assert (decision.wanted, len(decision.history)) == (6, 1)


def test_a_rollout_holds_fewer_cells_and_no_more_of_them() -> None:
    assert decide(view(place(current=6, history=agreed(2)), is_rolling=True)).rule is ScalingRule.ROLLOUT
    assert decide(view(place(load=PlaceLoad(50.0)), is_rolling=True)).wanted == 8


def test_what_is_remembered_stays_small() -> None:
    decisions = course(view(place(current=9)), [PlaceLoad(30.0 + number % 7) for number in range(2000)])
    assert max(len(decision.history) for decision in decisions) <= MAX_SAMPLES + 2
    assert decisions[-1].wanted == 6, "the most of it, 36 at 63 %"


def test_an_unknown_load_takes_nothing_away_but_its_range_holds() -> None:
    unknown = place(load=None, current=6, history=agreed(2))
    assert decide(view(unknown)).wanted == 6
    assert decide(view(replace(unknown, range=CellRange(1, 4)))).wanted == 4
    raised = decide(view(replace(unknown, range=CellRange(8, 9))))
    assert (raised.wanted, raised.rule, raised.reason) == (8, ScalingRule.MIN, "its range begins at 8")
    assert raised.needed is None


class TestObjective:
    LATE = PlaceLoad(40.0, late_burn=8.0)

    def test_a_step_more_once_the_last_one_had_its_time(self) -> None:
        more = decide(view(place(current=10, load=self.LATE)))
        assert (more.wanted, more.rule) == (11, ScalingRule.OBJECTIVE)
        assert more.reason == (
            "late first tokens burn their budget 8.0 times too fast; 6 is allowed: 1 cell more than 10"
        )
        assert decide(view(place(current=25, range=CellRange(1, 40), load=PlaceLoad(90.0, late_burn=8.0)))).wanted == 28
        for young in ({"ready_for_s": 359.0}, {"ready": 9}, {"ready_for_s": None}):
            assert decide(view(place(current=10, load=self.LATE, **young))).wanted == 10

    def test_while_they_do_there_are_never_fewer(self) -> None:
        young = place(current=10, load=self.LATE, ready_for_s=100.0, history=agreed(3))
        held = decide(view(young))
        assert (held.wanted, held.rule) == (10, ScalingRule.OBJECTIVE)
        assert held.history[-1].cells == 10, "and not for the agreement's time after"

    def test_idle_cells_are_not_what_is_lacking(self) -> None:
        assert decide(view(place(current=10, load=PlaceLoad(20.0, late_burn=50.0)))).wanted == 10

    def test_inter_token_latency_counts_where_it_is_bounded(self) -> None:
        slow = place(current=5, load=PlaceLoad(20.0, itl_p95_ms=90.0))
        assert decide(view(slow)).wanted == 5
        bounded = decide(view(slow, policy=parse_scaling_policy({"itl_p95_ms": 80}, ACTING)))
        assert (bounded.wanted, bounded.rule) == (6, ScalingRule.OBJECTIVE)
        assert "90 ms at its 95th percentile, beyond 80" in bounded.reason


class TestSchedule:
    """Windows of a schedule set a minimum."""

    POLICY = parse_scaling_policy(
        {
            "schedule": [
                {"cron": "30 12 * * *", "for_s": 3600, "cells": 7, "time_zone": "Europe/Berlin"},
                {"cron": "0 * * * *", "for_s": 120, "cells": 4},
                {"cron": "0 * * * *", "for_s": 120, "cells": 15, "region": "us-west-2"},
            ]
        },
        ACTING,
    )

    def test_the_open_window_that_wants_most_counts(self) -> None:
        decision = decide(view(place(), policy=self.POLICY))
        assert (decision.wanted, decision.rule) == (7, ScalingRule.SCHEDULE)
        assert "a window of the schedule (30 12 * * * Europe/Berlin) wants 7 cells" in decision.reason

    def test_it_ends_by_agreement_like_any_need(self) -> None:
        over = NOW + timedelta(minutes=30)
        decision = decide(view(place(current=7, history=agreed(7)), policy=self.POLICY), over)
        assert decision.wanted == 7

    def test_it_may_not_leave_the_range(self) -> None:
        decision = decide(view(place(range=CellRange(1, 5)), policy=self.POLICY))
        assert (decision.wanted, decision.rule) == (5, ScalingRule.MAX)


class TestBudget:
    """US dollars per hour for the machines of all cells."""

    POLICY = parse_scaling_policy({"budget_per_hour": 100}, ACTING)

    def wanted(self, *places: ScaledPlace, price: float = 10.0, elsewhere: float = 0.0) -> dict[str, int]:
        priced = [replace(one, cell_price=one.cell_price or price) for one in places]
        scaled = view(*priced, policy=self.POLICY, elsewhere_price=elsewhere)
        return {decision.region: decision.wanted for decision in plan_scaling(scaled, NOW)}

    def test_it_goes_to_where_most_is_lacking(self) -> None:
        east, west = place(load=PlaceLoad(84.0)), place("us-west-2", current=4, load=PlaceLoad(28.1))
        assert self.wanted(east, west) == {"us-east-1": 6, "us-west-2": 4}
        assert self.wanted(east, west, price=0.0) == {"us-east-1": 12, "us-west-2": 5}
        assert self.wanted(east, elsewhere=30.0) == {"us-east-1": 7}

    def test_of_equals_the_cheaper_place_gets_the_next_cell_and_each_costs_its_own_price(self) -> None:
        east = place(load=PlaceLoad(84.0), cell_price=12.0, current=2)
        west = place("us-west-2", load=PlaceLoad(84.0), cell_price=8.0, current=2)
        assert self.wanted(east, west) == {"us-east-1": 5, "us-west-2": 5}
        assert self.wanted(replace(east, cell_price=40.0), west) == {"us-east-1": 2, "us-west-2": 2}

    def test_it_takes_nothing_away(self) -> None:
        dear = decide(view(place(current=9, load=PlaceLoad(100.0), cell_price=20.0), policy=self.POLICY))
        assert (dear.wanted, dear.rule) == (9, ScalingRule.BUDGET)
        assert dear.reason.endswith("$100 per hour allow only 9 cells there, at $20 each")
        fewer = place(current=9, load=PlaceLoad(7.0), history=agreed(2))
        assert self.wanted(fewer, price=20.0) == {"us-east-1": 2}


def test_the_plan_of_the_day_is_a_need_like_any_other() -> None:
    soon = place(planned=PlannedNeed(5, "from 13:00 UTC on 30 requests at once are expected", 5))
    found = decide(view(soon))
    assert (found.wanted, found.rule) == (5, ScalingRule.PLAN)
    assert found.reason == "the day plan has 5 cells there: from 13:00 UTC on 30 requests at once are expected"
    kept = decide(view(place(current=5, planned=PlannedNeed(2, "less", 2), history=agreed(2)), policy=ACTING))
    assert kept.wanted == 2, "fewer by agreement, as of any need"
    busy = decide(view(place(load=PlaceLoad(60.0), planned=PlannedNeed(1, "nothing is expected", 1))))
    assert (busy.wanted, busy.rule) == (9, ScalingRule.UTILISATION), "a plan takes away nothing that is needed now"


def test_a_plan_keeps_cells_for_what_it_has_soon_after_and_asks_for_none_of_it_yet() -> None:
    soon = place(current=4, planned=PlannedNeed(2, "less", 4), history=agreed(2))
    assert decide(view(soon, policy=ACTING)).wanted == 4
    assert decide(view(replace(soon, current=3), policy=ACTING)).wanted == 3


def test_a_plan_stands_for_the_forecast_that_it_is_made_from() -> None:
    forecast = PlaceLoad(5.0, forecast=60.0)
    assert decide(view(place(load=forecast))).rule is ScalingRule.FORECAST
    planned = decide(view(place(load=forecast, planned=PlannedNeed(5, "30 are expected", 5))))
    assert (planned.wanted, planned.rule) == (5, ScalingRule.PLAN)


def test_what_it_may_not_have_now_it_still_wants_and_says_why() -> None:
    short = place(load=PlaceLoad(28.0), granted=3, grant_reason="team search has 3 of 3 local.cpu")
    decision = decide(view(short))
    assert decision.wanted == 4
    assert decision.reason.endswith("; 3 are granted: team search has 3 of 3 local.cpu")


def test_where_only_a_part_of_the_cells_answers_each_carries_less() -> None:
    load = PlaceLoad(14.0)
    assert decide(view(place(load=load))).wanted == 2
    assert decide(view(place(load=load, answering=0.25, current=8))).wanted == 8
    assert decide(view(place(load=load, answering=0.5))).wanted == 4


def test_the_planner_of_roles_asks_for_what_both_kinds_take() -> None:
    decision = decide(view(place(roles=PlannedNeed(5, "2.60 requests a second take 4 prefill, 1 decode"))))
    assert (decision.wanted, decision.rule) == (5, ScalingRule.ROLES)
    assert "4 prefill" in decision.reason


TARGET = 0.7
POLICY = ScalingPolicy(mode=ScalingMode.ACT, target_utilisation=TARGET)


def test_a_load_is_divided_by_the_capacities_of_the_cells_as_they_stay_and_come() -> None:
    there = place(load=PlaceLoad(0.7 * 49), current=2, capacities=(32.0, 8.0, 8.0))
    decision = decide(view(there, policy=POLICY))
    assert decision.wanted == 4, "32 and 8 are there, and 9 more take two of 8"
    assert "need 4 cells at 70% of what each was tested for: 3 for 8 and 1 for 32" in decision.reason


def test_growth_is_counted_by_the_type_that_a_further_cell_would_be_of() -> None:
    for further, cells in ((8.0, 2 + 5), (40.0, 2 + 1)):
        there = place(load=PlaceLoad(0.7 * 80), current=2, capacities=(32.0, 8.0, further))
        assert decide(view(there, policy=POLICY)).wanted == cells


@given(st.floats(0.0, 500.0), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_so_many_cells_carry_the_load_and_one_fewer_does_not(load: float, capacities: list[int]) -> None:
    there = place(load=PlaceLoad(load), current=1, capacities=tuple(map(float, capacities)))
    needed = decide(view(there, policy=POLICY)).needed
    assert needed is not None

    def carried(cells: int) -> float:
        return TARGET * sum(capacities[min(at, len(capacities) - 1)] for at in range(cells))

    if 1 < needed < 20:
        assert carried(needed) >= load * (1 - 1e-6)
        assert carried(needed - 1) < load * (1 + 1e-6)


@given(st.floats(0.0, 300.0), st.integers(1, 64), st.integers(0, 12))
def test_equal_capacities_are_as_one_number(load: float, capacity: int, there: int) -> None:
    alike = place(load=PlaceLoad(load), capacities=(float(capacity),) * (there + 1))
    plain = place(load=PlaceLoad(load))
    found = decide(view(alike, policy=POLICY)).needed
    assert found == decide(view(plain, policy=POLICY, per_cell=float(capacity))).needed
    assert found is not None
    assert found >= min(20, math.floor(load / (TARGET * capacity)))


def test_too_few_and_too_many_are_counted_apart() -> None:
    once = regret_after(Regret(), wanted=3, needed=5, in_force=2, passed_s=5.0)
    assert once == Regret(5.0, 10.0, 0.0, 10.0)
    assert regret_after(once, wanted=3, needed=1, in_force=3, passed_s=2.0) == Regret(7.0, 10.0, 4.0, 16.0)


def test_a_time_without_a_look_counts_only_so_far() -> None:
    assert regret_after(Regret(), wanted=1, needed=1, in_force=1, passed_s=3600.0).observed_s == MAX_CHECK_GAP_S
    assert regret_after(Regret(), wanted=1, needed=1, in_force=1, passed_s=-4.0) == Regret()


JOBS = CloudMetric("Jobs", "Waiting", 100.0)


@pytest.mark.parametrize(
    ("value", "current", "wanted", "rule"),
    [
        pytest.param(250.0, 2, 3, ScalingRule.METRIC, id="needs more"),
        pytest.param(1e300, 2, 20, ScalingRule.MAX, id="to the end of the range"),
        pytest.param(95.0, 2, 2, ScalingRule.AGREEMENT, id="not with a tenth to spare"),
        pytest.param(0.0, 2, 1, ScalingRule.UTILISATION, id="none"),
        pytest.param(-5.0, 2, 1, ScalingRule.UTILISATION, id="below zero"),
        pytest.param(None, 6, 6, ScalingRule.METRIC, id="absent data change nothing"),
    ],
)
def test_a_metric_asks_for_cells(value: float | None, current: int, wanted: int, rule: ScalingRule) -> None:
    there = place(current=current, load=PlaceLoad(1.0), history=agreed(1), metrics=(MetricValue(JOBS, value),))
    decision = decide(view(there))
    assert (decision.wanted, decision.rule) == (wanted, rule)


def test_absent_data_of_a_metric_hold_no_other_rule_back_and_keep_the_last_cell() -> None:
    absent = (MetricValue(JOBS, None, "CloudWatch has none"),)
    assert decide(view(place(load=PlaceLoad(70.0), metrics=absent))).wanted == 10
    idle = place(range=CellRange(0, 20), current=1, history=agreed(0, 2000.0), metrics=absent)
    idle = replace(idle, idle_since=NOW - timedelta(days=1))
    decision = decide(view(idle))
    assert decision.wanted == 1
    assert decision.reason.startswith(
        "Average of Jobs Waiting has no recent value (CloudWatch has none): it keeps 1 cell"
    )
    first = decide(view(place(range=CellRange(0, 20), current=0, metrics=(MetricValue(JOBS, 1.0),))))
    assert (first.wanted, first.rule) == (1, ScalingRule.METRIC)
