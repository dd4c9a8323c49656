"""For any load: the range holds, more load never means fewer cells, growth is immediate, and a swinging load does not
add and remove cells repeatedly."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.autoscaling.planning.needs import NeedSample, PlaceLoad, ScaledPlace, ScalingView, greatest_need
from fleet.autoscaling.planning.planner import agreement_s, plan_scaling
from fleet.autoscaling.planning.policy import CellRange, ScalingMode, ScalingPolicy, WakeOn
from tests.fleet.autoscaling.scaled import NOW, course, decide, turns, view, wanted_over

requests = st.floats(0, 2000)
maybe = st.none() | requests
loads = st.builds(
    PlaceLoad,
    requests,
    requests,
    offered=maybe,
    autopilot=maybe,
    forecast=maybe,
    late_burn=maybe,
    itl_p95_ms=st.none() | requests,
    held=st.just(0.0) | requests,
    arrivals_per_s=st.just(0.0) | requests,
    elsewhere=st.just(0.0) | requests,
    backlog=st.just(0.0) | requests,
)
ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(
    lambda ends: CellRange(ends[0], max(1, ends[0] + ends[1]))
)
policies = st.builds(
    ScalingPolicy,
    mode=st.sampled_from(ScalingMode),
    target_utilisation=st.floats(0.1, 0.8),
    slo_burn=st.none() | st.floats(1, 20),
    itl_p95_ms=st.none() | st.floats(1, 500),
    down_after_s=st.floats(60, 7200),
    budget_per_hour=st.none() | st.floats(0, 500),
    idle_s=st.floats(10, 7200),
    wake=st.sampled_from(WakeOn),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[NeedSample, ...]:
    gaps = draw(st.lists(st.floats(1, 90), max_size=40))
    ago, samples = 0.0, []
    for gap in gaps:
        ago += gap
        samples.append(NeedSample(NOW - timedelta(seconds=ago), draw(st.integers(0, 200))))
    return tuple(reversed(samples))


@st.composite
def places(draw: st.DrawFn, region: str = "us-east-1") -> ScaledPlace:
    return ScaledPlace(
        region,
        draw(ranges),
        current=draw(st.integers(0, 150)),
        ready=draw(st.integers(0, 150)),
        ready_for_s=draw(st.none() | st.floats(0, 1e5)),
        load=draw(st.none() | loads),
        idle_since=draw(st.none() | st.floats(0, 8000).map(lambda ago: NOW - timedelta(seconds=ago))),
        history=draw(histories()),
        cell_price=draw(st.floats(0.5, 100) | st.just(0.0)),
    )


@st.composite
def views(draw: st.DrawFn, /, **fixed: Any) -> ScalingView:
    known: dict[str, Any] = {
        "policy": draw(policies),
        "per_cell": draw(st.floats(1, 256)),
        "utilisation_cap": draw(st.floats(0.05, 0.8)),
        "start_up_s": draw(st.floats(1, 3600)),
        "elsewhere_price": draw(st.floats(0, 1000)),
        "is_rolling": draw(st.booleans()),
        **fixed,
    }
    return ScalingView("chat", places=(draw(places()), draw(places("us-west-2"))), **known)


@given(views())
def test_the_range_holds_whatever_is_seen(scaled: ScalingView) -> None:
    for there, decision in zip(scaled.places, plan_scaling(scaled, NOW), strict=True):
        assert there.range.min <= decision.wanted <= there.range.max
        assert decision.needed is None or there.range.min <= decision.needed <= there.range.max
        assert decision.reason


@given(
    views(),
    st.floats(0, 500),
    st.sampled_from(["in_flight", "queued", "offered", "autopilot", "forecast", "late_burn"]),
)
def test_more_load_never_means_fewer_cells(scaled: ScalingView, more: float, what: str) -> None:
    there = scaled.places[0]
    if there.load is None:
        return
    known = getattr(there.load, what)
    if known is None:  # an offered load below the waiting requests would be less load
        known = there.load.in_flight + there.load.queued if what == "offered" else 0.0
    loaded = replace(there, load=replace(there.load, **{what: known + more}))
    before = plan_scaling(replace(scaled, places=(there,)), NOW)[0]
    after = plan_scaling(replace(scaled, places=(loaded,)), NOW)[0]
    assert after.wanted >= before.wanted


@given(views(), st.integers(0, 1))
def test_growth_waits_for_nothing_but_the_range_and_the_budget(scaled: ScalingView, which: int) -> None:
    """No agreement time, rollout or starting cell delays growth."""
    free = replace(scaled, policy=replace_budget(scaled.policy))
    there, decision = free.places[which], plan_scaling(free, NOW)[which]
    needed = greatest_need(free, there, NOW).cells
    assert decision.wanted >= min(needed, there.range.max)


@given(views())
def test_a_budget_is_kept_or_nothing_grows(scaled: ScalingView) -> None:
    decisions = plan_scaling(scaled, NOW)
    budget = scaled.policy.budget_per_hour
    cost = scaled.elsewhere_price + sum(
        one.wanted * place.cell_price for one, place in zip(decisions, scaled.places, strict=True)
    )
    floor = [max(min(place.current, place.range.max), place.range.min) for place in scaled.places]
    if budget is not None and cost > budget + 1e-6:
        is_dear = [place.cell_price > 0 for place in scaled.places]
        assert all(one.wanted <= most for one, most, dear in zip(decisions, floor, is_dear, strict=True) if dear)


@pytest.mark.slow
@given(views())
def test_cells_go_only_by_an_agreement_that_was_seen(scaled: ScalingView) -> None:
    for there, decision in zip(scaled.places, plan_scaling(scaled, NOW), strict=True):
        if decision.wanted < min(there.current, there.range.max):
            assert there.load is not None
            assert not scaled.is_rolling
            assert (NOW - decision.history[0].at).total_seconds() >= agreement_s(scaled)
            assert decision.wanted >= max(there.range.min, min(decision.history[-1].cells, there.range.max))


@pytest.mark.slow
@given(st.floats(0, 180), st.integers(1, 20))
@settings(max_examples=settings().max_examples // 3)
def test_a_constant_load_comes_to_rest(load: float, begin: int) -> None:
    scaled = view()
    (there,) = scaled.places
    numbers = wanted_over(replace(scaled, places=(replace(there, current=begin, ready=begin),)), lambda _: load, 1800.0)
    assert turns(numbers) == 0
    assert len(set(numbers[140:])) == 1, "once the agreement is over"


@pytest.mark.slow
@given(st.floats(5, 90), st.floats(0, 1), st.floats(30, 580), st.floats(0, 2 * math.pi))
@settings(max_examples=settings().max_examples // 3)
def test_a_swing_shorter_than_the_agreement_moves_nothing(mean: float, swing: float, period: float, at: float) -> None:
    def load(second: float) -> float:
        return mean * (1 + swing * math.sin(at + 2 * math.pi * second / period))

    settled = wanted_over(view(), load, 3600.0)[int(period / 5) + 130 :]
    assert len(set(settled)) == 1, sorted(set(settled))


@pytest.mark.slow
@given(st.floats(20, 60), st.floats(0.3, 0.9), st.integers(3600, 14_400))
@settings(max_examples=settings().max_examples // 3)
def test_a_slow_swing_is_followed_without_trembling(mean: float, swing: float, period: int) -> None:
    def load(second: float) -> float:
        return mean * (1 + swing * math.sin(2 * math.pi * second / period))

    numbers = wanted_over(view(), load, 3.0 * period)
    assert turns(numbers) <= 2 * 3 + 1, "up and down once a period"
    for place, wanted in enumerate(numbers):
        assert wanted * 10.0 * 0.7 >= min(load(place * 5.0), 20 * 10.0 * 0.7) - 1e-6, "never too few"


@given(st.lists(st.none() | st.floats(0, 300), min_size=1, max_size=80))
def test_nothing_is_taken_away_while_the_agreement_is_shorter_than_its_time(load: list[float | None]) -> None:
    looks = [None if one is None else PlaceLoad(one) for one in load]
    numbers = [decision.wanted for decision in course(view(), looks)]
    assert numbers == sorted(numbers), "80 looks are less than ten minutes"


@given(views())
def test_the_last_cell_goes_only_when_nobody_asks_and_nobody_did(scaled: ScalingView) -> None:
    for there, decision in zip(scaled.places, plan_scaling(scaled, NOW), strict=True):
        if decision.wanted == 0 < there.current:
            assert there.load is not None
            asks = (there.load.total, there.load.held, there.load.backlog, there.load.arrivals_per_s)
            assert set(asks) == {0.0}
            assert there.idle_since is not None
            assert (NOW - there.idle_since).total_seconds() >= scaled.policy.idle_s


@given(views())
def test_who_waits_is_never_left_without_a_cell(scaled: ScalingView) -> None:
    unbounded = replace(scaled, policy=replace_budget(scaled.policy))
    for there, decision in zip(unbounded.places, plan_scaling(unbounded, NOW), strict=True):
        if there.load is not None and (there.load.held or there.load.backlog):
            assert decision.wanted >= 1


def replace_budget(policy: ScalingPolicy) -> ScalingPolicy:
    return ScalingPolicy(
        policy.mode, policy.target_utilisation, policy.slo_burn, policy.itl_p95_ms, policy.down_after_s
    )


def test_shadow_decides_as_acting_does() -> None:
    one = decide(view(policy=ScalingPolicy(mode=ScalingMode.SHADOW)))
    assert one == decide(view(policy=ScalingPolicy(mode=ScalingMode.ACT)))
