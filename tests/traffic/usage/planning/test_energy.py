"""All machine time is accounted for once, by a meter or an estimate; tables of decisions about implausible meters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.rates import PowerRating
from models_registry.instance_types.planner import IDLE_SHARE
from traffic.usage.planning.energy import (
    ACCELERATORS,
    HOST,
    QUIET_MS,
    REFUSED_MOST,
    SLACK_MS,
    Energy,
    MeterMark,
    MeterPlan,
    MeterSample,
    MeterTotals,
    Suspicion,
    Use,
    estimate,
    meters_of,
    most_microjoules,
    plan_energy,
    plan_part,
    plan_power_meters,
    use_of,
)

WATTS = 700.0
LOOK_MS = 5_000
IDLE_UW_MS = round(WATTS * IDLE_SHARE * 1000)


def meter(covered_ms: int, watts: float = 300, **more: Any) -> MeterTotals:
    return MeterTotals("life", round(watts * covered_ms * 1000), covered_ms=covered_ms, **more)


def test_a_meter_is_believed_and_nothing_is_estimated_beside_it() -> None:
    mark = MeterMark(meter(60_000))
    taken, mark2 = plan_part(meter(65_000), mark, LOOK_MS, WATTS, 1.0)
    assert taken == Energy(measured=300 * 5_000_000)
    assert mark2 == MeterMark(meter(65_000))


def test_devices_that_tell_per_cents_are_rated() -> None:
    before = MeterMark(MeterTotals("life", covered_ms=0))
    taken, _ = plan_part(MeterTotals("life", full_power_ms=2_500, covered_ms=5_000), before, LOOK_MS, WATTS, 0.0)
    assert taken == Energy(rated=round(2_500 * WATTS * 1000))
    unknown, _ = plan_part(MeterTotals("life", full_power_ms=2_500, covered_ms=5_000), before, LOOK_MS, None, 0.0)
    assert unknown == Energy(unrated_ms=2_500)


def test_without_a_meter_the_rating_and_the_use_say_it() -> None:
    assert plan_part(None, None, LOOK_MS, WATTS, 0.0) == (estimate(LOOK_MS, WATTS, 0.0), None)
    assert estimate(LOOK_MS, WATTS, 0.0).estimated == pytest.approx(IDLE_UW_MS * LOOK_MS, rel=1e-3)
    assert estimate(LOOK_MS, WATTS, 1.0).estimated == round(WATTS * LOOK_MS * 1000)
    assert estimate(LOOK_MS, None, 1.0) == Energy(unrated_ms=LOOK_MS)


def test_a_meter_that_says_more_than_the_part_can_draw_is_refused_and_estimated() -> None:
    mark: MeterMark | None = MeterMark(meter(60_000))
    total = Energy()
    for look in range(1, 9):
        taken, mark = plan_part(meter(60_000 + look * LOOK_MS, watts=9_000), mark, LOOK_MS, WATTS, 1.0)
        total += taken
    assert (total.measured, total.refused) == (0, 8)
    assert total.estimated > 0
    assert mark is not None
    assert total.estimated == round(WATTS * (8 * LOOK_MS - mark.gap_ms) * 1000)


def test_a_meter_that_falls_silent_is_replaced_and_not_counted_again_when_it_speaks() -> None:
    mark: MeterMark | None = MeterMark(meter(60_000))
    total = Energy()
    for _ in range(120):  # ten minutes of an agent that is cut off and keeps reading
        taken, mark = plan_part(meter(60_000), mark, LOOK_MS, WATTS, 1.0)
        total += taken
    estimated = total.estimated
    assert estimated >= WATTS * (600_000 - SLACK_MS - LOOK_MS) * 1000
    taken, mark = plan_part(meter(60_000 + 605_000), mark, LOOK_MS, WATTS, 1.0)
    assert taken.estimated == 0
    assert taken.measured <= 300 * (SLACK_MS + 2 * LOOK_MS) * 1000


def test_another_life_of_the_agent_begins_at_nothing() -> None:
    mark = MeterMark(meter(60_000))
    young = MeterTotals("next", 300 * 4_000_000, covered_ms=4_000)
    taken, after = plan_part(young, mark, LOOK_MS, WATTS, 1.0)
    assert (taken, after) == (Energy(measured=300 * 4_000_000), MeterMark(young, 1_000))
    old = MeterTotals("old", 300 * 9_000_000_000, covered_ms=9_000_000)
    taken, after = plan_part(old, None, LOOK_MS, WATTS, 1.0)
    assert (taken, after) == (Energy(), MeterMark(old, LOOK_MS))


def test_a_report_that_is_late_takes_nothing_back() -> None:
    mark = MeterMark(meter(60_000))
    taken, after = plan_part(meter(55_000), mark, LOOK_MS, WATTS, 1.0)
    assert (taken, after) == (Energy(), MeterMark(meter(60_000), LOOK_MS))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["life", "next"]), st.integers(0, 2**45), st.integers(0, 2**25), st.integers(0, 2**25),
        st.integers(0, 3),
    ),
    max_size=30,
)  # fmt: skip


@given(STEPS, st.floats(1, 10_000), st.floats(0, 1))
def test_whatever_a_node_claims_it_takes_no_more_than_it_can(
    steps: list[tuple[str, int, int, int, int]], watts: float, busy: float
) -> None:
    mark: MeterMark | None = None
    total, elapsed = Energy(), 0
    for claim in steps:
        taken, mark = plan_part(MeterTotals(*claim), mark, LOOK_MS, watts, busy)
        total += taken
        elapsed += LOOK_MS
        assert min(taken.measured, taken.rated, taken.estimated, taken.unrated_ms, taken.refused) >= 0
        assert mark is not None
        assert -SLACK_MS <= mark.gap_ms <= SLACK_MS
    assert total.total <= most_microjoules(watts, elapsed + SLACK_MS)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_jitter_of_reports_neither_loses_nor_adds_energy(jitter: list[int]) -> None:
    """A correct meter, read with seconds of delay: eventually all of its energy is counted."""
    mark: MeterMark | None = MeterMark(MeterTotals("life"))
    total, now = Energy(), 0
    for late in jitter:
        now += LOOK_MS
        seen = max(now - late * 1000, mark.totals.covered_ms if mark else 0)
        taken, mark = plan_part(meter(seen), mark, LOOK_MS, WATTS, 1.0)
        total += taken
    assert mark is not None
    assert total == Energy(measured=mark.totals.microjoules)
    assert now - mark.totals.covered_ms == mark.gap_ms


def test_parts_are_added_up_and_one_that_is_not_there_takes_nothing() -> None:
    rating = PowerRating(accelerators=700, host=100)
    taken, kept = plan_energy({}, {}, 1000, rating, Use(1.0, 0.0))
    assert taken.total == 700_000_000 + round(100 * IDLE_SHARE * 1_000_000)
    assert kept == {}
    taken, kept = plan_energy({HOST: meter(1000)}, {}, 1000, PowerRating(700, 0), Use(1.0, 1.0))
    assert (taken, kept) == (Energy(estimated=700_000_000), {})


def test_meters_are_read_out_of_what_a_node_says_and_nonsense_is_passed_over() -> None:
    good = {"covers": ACCELERATORS, "since": "a", "microjoules": 5, "covered_ms": 2}
    assert meters_of([good, {**good, "microjoules": 9}]) == {ACCELERATORS: MeterTotals("a", 5, covered_ms=2)}
    nonsense: list[Any] = [
        None, "text", 7, [7], [{}], [{**good, "microjoules": -1}], [{**good, "covered_ms": True}],
        [{**good, "since": 3}], [{**good, "covers": "moon"}], [{**good, "microjoules": 2**80}],
    ]  # fmt: skip
    assert [meters_of(each) for each in nonsense] == [{}] * len(nonsense)


def test_use_is_what_the_machine_says_and_else_what_its_cell_does() -> None:
    devices = [{"utilisation_percent": 20.0}, {"utilisation_percent": 60}, {"utilisation_percent": None}]
    assert use_of(devices, 50.0, True) == Use(0.4, 0.5)
    assert use_of([], None, True) == Use(1.0, 1.0)
    assert use_of([{"utilisation_percent": 900}], -3, False) == Use(0.0, 0.0)


GOOD, BAD, SILENT, NONE = (
    MeterSample(0, True),
    MeterSample(1, False),
    MeterSample(0, False),
    MeterSample(0, False, False),
)
STEP_MS = 15_000


def after(*looks: MeterSample | None, step_ms: int = STEP_MS) -> tuple[list[str], MeterPlan]:
    """Events by pass: `+` opened, `-` closed, `.` neither; and the last plan."""
    plan, open_about, happened = MeterPlan({}), frozenset[str](), []
    for number, look in enumerate(looks):
        seen = {} if look is None else {"n": look}
        plan = plan_power_meters(seen, plan.suspicions, open_about, number * step_ms)
        opened, closed = {node for node, _ in plan.opened}, {node for node, _ in plan.closed}
        open_about = (open_about | opened) - closed
        happened.append("+" if opened else "-" if closed else ".")
    return happened, plan


@pytest.mark.parametrize(
    ("looks", "happened"),
    [
        ((GOOD, BAD, GOOD, BAD, GOOD), "....."),
        ((BAD, BAD, BAD, BAD), "..+."),
        ((MeterSample(REFUSED_MOST + 1, True),), "+"),
        ((BAD, BAD, BAD, None), "..+-"),
        ((BAD, BAD, BAD, NONE), "..+-"),
        ((BAD, BAD, BAD, GOOD), "..+."),
    ],
    ids=["two restarts", "one after another", "many at once", "gone", "without a meter", "believed for a moment"],
)
def test_what_is_opened_and_closed(looks: tuple[MeterSample | None, ...], happened: str) -> None:
    assert "".join(after(*looks)[0]) == happened


def test_it_ends_after_ten_minutes_of_readings_that_are_believed() -> None:
    quiet = QUIET_MS // STEP_MS
    happened, plan = after(BAD, BAD, BAD, *[GOOD] * quiet)
    assert (happened[2], happened[-2], happened[-1]) == ("+", ".", "-")
    assert plan.closed == (("n", "its readings are plausible again"),)
    assert not plan.suspicions


def test_a_node_that_says_nothing_keeps_its_incident() -> None:
    happened, plan = after(BAD, BAD, BAD, *[SILENT] * (3 * QUIET_MS // STEP_MS))
    assert happened.count("-") == 0
    assert plan.suspicions["n"].refused == 3


def test_what_was_wrong_long_ago_is_not_added_to() -> None:
    before = {"n": Suspicion(2, 0, 0)}
    plan = plan_power_meters({"n": BAD}, before, frozenset(), QUIET_MS + 1)
    assert plan.suspicions == {"n": Suspicion(1, QUIET_MS + 1, QUIET_MS + 1)}
    assert not plan.opened


looks = st.sampled_from([GOOD, BAD, SILENT, NONE, None])


@given(st.lists(looks, max_size=60), st.integers(1_000, 400_000))
def test_an_incident_is_opened_before_it_is_closed_and_a_meter_that_is_never_refused_has_none(
    seen: list[MeterSample | None], step_ms: int
) -> None:
    happened = [one for one in after(*seen, step_ms=step_ms)[0] if one != "."]
    assert happened == ["+", "-"] * (len(happened) // 2) + ["+"] * (len(happened) % 2)
    assert BAD in seen or not happened
