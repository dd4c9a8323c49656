"""Places without cells: when the last cell stops, what starts the first one, and what keeps it from getting
machines."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from engine_agent.protocol.ingress_messages import Withheld
from fleet.autoscaling.planning.needs import (
    REQUEST_HOLD_LEAST_S,
    PlaceDecision,
    PlaceLoad,
    ScaledPlace,
    ScalingRule,
    ScalingView,
    hold_s,
    may_be_empty,
    ready_at_s,
    stepped_s,
    withheld_by,
)
from fleet.autoscaling.planning.planner import plan_scaling
from fleet.autoscaling.planning.policy import CellRange, ScalingMode, ScalingPolicy, ScheduleWindow, WakeOn
from fleet.deployments.planner import ClaimView, GrantRule
from tests.fleet.autoscaling.scaled import NOW, agreed, decide, place, view

POLICY = ScalingPolicy(mode=ScalingMode.ACT, idle_s=900.0)
QUIET = PlaceLoad(0.0)


def empty(**changes: Any) -> ScaledPlace:
    return place(**{"range": CellRange(0, 9), "current": 0, "ready": 0, "ready_for_s": None, "load": QUIET, **changes})


def last(**changes: Any) -> ScaledPlace:
    """One cell of up to nine; none would have been enough for long."""
    return empty(**{"current": 1, "ready": 1, "ready_for_s": 3600.0, "history": agreed(0), **changes})


def idle(seconds: float) -> dict[str, Any]:
    return {"idle_since": NOW - timedelta(seconds=seconds)}


def decided(one: ScaledPlace, policy: ScalingPolicy = POLICY, **changes: Any) -> tuple[int, ScalingRule]:
    decision = decide(view(one, policy=policy, **changes))
    return decision.wanted, decision.rule


def look_by_look(loads: Iterable[PlaceLoad | None], *, every_s: float = 5.0) -> list[PlaceDecision]:
    scaled, there, decisions = view(last(history=()), policy=POLICY), last(history=()), []
    for number, load in enumerate(loads):
        (decision,) = plan_scaling(
            replace(scaled, places=(replace(there, load=load),)), NOW + timedelta(seconds=number * every_s)
        )
        there = replace(
            there,
            current=decision.wanted,
            ready=decision.wanted,
            history=decision.history,
            idle_since=decision.idle_since,
        )
        decisions.append(decision)
    return decisions


def test_the_last_cell_goes_once_nobody_has_asked_for_as_long_as_the_policy_says() -> None:
    assert decided(last(**idle(899))) == (1, ScalingRule.IDLE)
    assert decided(last(**idle(901))) == (0, ScalingRule.MIN)
    assert decided(last()) == (1, ScalingRule.IDLE), "nobody knows since when"


@pytest.mark.parametrize(
    "load",
    [
        PlaceLoad(0.01),
        PlaceLoad(0.0, arrivals_per_s=0.001),
        PlaceLoad(0.0, backlog=0.01, backlog_requests=3),
        PlaceLoad(0.0, held=1.0),
        PlaceLoad(0.0, queued=1.0),
    ],
)
def test_it_stays_while_anybody_asks_for_anything(load: PlaceLoad) -> None:
    decision = decide(view(last(load=load, **idle(5000)), policy=POLICY))
    assert (decision.wanted, decision.idle_since) == (1, None)


def test_an_unknown_load_is_no_idleness() -> None:
    decision = decide(view(last(load=None, **idle(5000)), policy=POLICY))
    assert (decision.wanted, decision.rule, decision.idle_since) == (1, ScalingRule.UNKNOWN_LOAD, None)


def test_a_time_that_nobody_saw_is_no_idleness() -> None:
    unseen = tuple(replace(sample, at=sample.at - timedelta(seconds=90)) for sample in agreed(0))
    assert decide(view(last(history=unseen, **idle(5000)), policy=POLICY)).idle_since == NOW


def test_there_are_no_fewer_during_a_rollout() -> None:
    assert decided(last(**idle(5000)), is_rolling=True) == (1, ScalingRule.ROLLOUT)


def test_one_request_in_between_begins_the_time_anew() -> None:
    looks = [QUIET] * 150 + [PlaceLoad(0.2)] + [QUIET] * 200
    numbers = [one.wanted for one in look_by_look(looks)]
    assert numbers.index(0) == 151 + 180, "15 minutes after the last request"


def test_more_than_one_go_in_the_same_moment_as_the_last() -> None:
    assert decided(last(current=3, ready=3, **idle(901))) == (0, ScalingRule.MIN)
    assert decided(last(current=3, ready=3, **idle(700))) == (1, ScalingRule.IDLE)


def test_one_waiting_request_starts_one_cell_at_once() -> None:
    decision = decide(view(empty(load=PlaceLoad(0.0, held=1.0)), policy=POLICY))
    assert (decision.wanted, decision.rule) == (1, ScalingRule.WAITING)
    assert decision.reason.startswith("1 request waits for its first cell: 1 cell at 70% of 10 each")


@pytest.mark.parametrize(
    ("held", "offered", "wanted"), [(40.0, None, 6), (40.0, 12.0, 2), (40.0, 0.0, 1), (900, None, 9)]
)
def test_many_start_as_many_as_they_take(held: float, offered: float | None, wanted: int) -> None:
    assert decided(empty(load=PlaceLoad(0.0, held=held, offered=offered)))[0] == wanted


def test_with_nobody_there_are_none() -> None:
    assert decided(empty()) == (0, ScalingRule.MIN)


def test_who_has_left_starts_none() -> None:
    assert decided(empty(load=PlaceLoad(0.0, queued=4.0, arrivals_per_s=0.3, autopilot=2.0))) == (0, ScalingRule.MIN)


def test_work_that_is_queued_starts_one_and_more_as_its_time_runs_out() -> None:
    assert decided(empty(load=PlaceLoad(0.0, backlog=0.1, backlog_requests=4))) == (1, ScalingRule.BACKLOG)
    assert decided(empty(load=PlaceLoad(0.0, backlog=20.0, backlog_requests=4000))) == (3, ScalingRule.BACKLOG)
    assert decided(last(load=PlaceLoad(8.0, backlog=20.0, backlog_requests=4000))) == (3, ScalingRule.BACKLOG)


def two_regions(policy: ScalingPolicy, other: PlaceLoad, **changes: Any) -> PlaceDecision:
    """Decision for a region without cells while another serves its requests."""
    away = place("us-west-2", range=CellRange(1, 4), current=4, ready=4, load=other)
    scaled = view(empty(load=PlaceLoad(0.0, elsewhere=3.0)), away, policy=policy, **changes)
    return plan_scaling(scaled, NOW)[0]


def test_what_another_region_serves_starts_none() -> None:
    assert two_regions(POLICY, PlaceLoad(20.0)).wanted == 0


def test_what_it_has_no_room_for_does() -> None:
    decision = two_regions(POLICY, PlaceLoad(35.0))
    assert (decision.wanted, decision.rule) == (1, ScalingRule.ARRIVALS)
    assert "no room for more" in decision.reason
    assert two_regions(POLICY, PlaceLoad(35.0), is_full_elsewhere=False).wanted == 0


def test_a_policy_starts_one_for_its_own_applications_in_any_case() -> None:
    policy = replace_wake(POLICY)
    assert two_regions(policy, PlaceLoad(2.0)).wanted == 1
    assert decided(last(load=PlaceLoad(0.0, elsewhere=0.5), **idle(5000)), policy)[0] == 1


def replace_wake(policy: ScalingPolicy) -> ScalingPolicy:
    return ScalingPolicy(mode=policy.mode, idle_s=policy.idle_s, wake=WakeOn.ARRIVALS)


def test_a_window_of_zero_lets_a_range_begin_there() -> None:
    night = ScheduleWindow("0 12 * * *", 3600.0, 0)
    policy = ScalingPolicy(mode=ScalingMode.ACT, schedule=(night,))
    scaled = last(range=CellRange(2, 9), **idle(5000))
    assert decided(scaled, policy)[0] == 0
    assert decide(view(scaled, policy=policy), NOW - timedelta(minutes=1)).wanted == 2
    both = ScalingPolicy(mode=ScalingMode.ACT, schedule=(night, ScheduleWindow("0 12 * * *", 60.0, 3)))
    assert decided(scaled, both) == (3, ScalingRule.SCHEDULE)


def test_a_forecast_of_next_to_nobody_keeps_none() -> None:
    assert decided(last(load=PlaceLoad(0.0, forecast=0.01), **idle(5000)))[0] == 0
    assert decided(empty(load=PlaceLoad(0.0, forecast=0.2))) == (1, ScalingRule.FORECAST)


def test_requests_are_held_for_two_starts_within_bounds() -> None:
    assert hold_s(POLICY, 3.0) == REQUEST_HOLD_LEAST_S
    assert 180 <= hold_s(POLICY, 90.0) <= 180 * 1.25 + 1
    assert hold_s(POLICY, 3600.0) == 600
    assert hold_s(ScalingPolicy(hold_s=12.5), 3600.0) == 13


def test_start_up_times_are_told_in_steps() -> None:
    told = {stepped_s(1.0 + number / 10) for number in range(3000)}
    assert len(told) < 30
    assert all(stepped_s(seconds) >= seconds for seconds in (0.2, 1.0, 17.3, 90.0, 3600.0))


def test_the_first_of_those_that_start_is_expected_first() -> None:
    now_s = int(NOW.timestamp())
    assert ready_at_s([NOW, NOW - timedelta(seconds=30)], 90.0) == now_s - 30 + stepped_s(90.0)
    assert ready_at_s([], 90.0) == 0


def test_who_may_be_empty() -> None:
    assert may_be_empty(POLICY, [CellRange(1, 2), CellRange(0, 2)])
    assert may_be_empty(ScalingPolicy(schedule=(ScheduleWindow("0 1 * * *", 60.0, 0),)), [CellRange(1, 2)])
    assert not may_be_empty(POLICY, [CellRange(1, 2)])


def test_the_view_is_not_asked_who_is_crowded_out() -> None:
    scaled: ScalingView = view(empty(load=PlaceLoad(0.0, elsewhere=1.0)), policy=POLICY)
    assert scaled.displaced_regions == frozenset()


NOTHING, QUOTA, MACHINES = Withheld.NOTHING, Withheld.QUOTA, Withheld.MACHINES


def claim(asked: int, granted: int | None = None, rule: GrantRule | None = None) -> ClaimView:
    return ClaimView(asked, 0, granted, rule=rule)


AT_QUOTA, TAKEN_BACK = claim(1, 0, GrantRule.QUOTA), claim(2, 0, GrantRule.RECLAIM)
MADE_ROOM, COMES_BACK = claim(1, 0, GrantRule.PRIORITY), claim(1, 0, GrantRule.RETURN)


@pytest.mark.parametrize(
    ("claims", "by"),
    [
        ((), NOTHING),
        ((claim(0),), NOTHING),
        ((claim(1),), NOTHING),
        ((claim(2, 1, GrantRule.QUOTA),), NOTHING),
        ((claim(0, 0, GrantRule.QUOTA),), NOTHING),
        ((AT_QUOTA,), QUOTA),
        ((TAKEN_BACK,), QUOTA),
        ((MADE_ROOM,), MACHINES),
        ((COMES_BACK,), NOTHING),
        ((AT_QUOTA, claim(1)), NOTHING),
        ((AT_QUOTA, claim(0)), NOTHING),
        ((AT_QUOTA, MADE_ROOM), MACHINES),
    ],
)
def test_a_cell_is_withheld_where_every_place_that_was_set_one_may_have_none(
    claims: tuple[ClaimView, ...], by: Withheld
) -> None:
    assert withheld_by(claims) is by
