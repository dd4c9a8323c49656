"""The region autopilot over minutes of virtual time: loss, flapping, evacuation, recovery, surge, silence."""

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest

from tests.traffic.planning.steering import NOW, ClosedLoop, constant
from traffic.planning.overrides import EvacuationMode, OverrideKind, OverrideView
from traffic.planning.shift import ShiftKind

HUNDRED = constant(dict.fromkeys("abcd", 100.0))
ABC = ("a", "b", "c")


def falls_at(at: float, to: float, back_at: float = 1e9, name: str = "a") -> Callable[[str, float], float]:
    return lambda region, at_s: to if region == name and at <= at_s < back_at else 100.0


def test_a_region_that_loses_two_thirds_is_relieved_in_the_next_pass_and_nobody_exceeds_the_cap() -> None:
    loop = ClosedLoop(falls_at(60.0, 33.3), constant({"a": 50.0, "b": 40.0}))
    loop.run(62.0)
    ((at_s, shift, moved),) = loop.moves
    assert at_s == 60.0
    assert shift.kind is ShiftKind.RELIEF
    assert moved == pytest.approx(1 - 0.95 * 0.8 * 33.3 / 50, abs=1e-3)
    assert loop.utilisation("a") <= 0.8
    assert loop.utilisation("b") <= 0.8
    assert len(loop.run(600.0).moves) == 1


def test_it_comes_home_a_minute_after_its_capacity_in_steps_of_ten_points() -> None:
    loop = ClosedLoop(falls_at(60.0, 33.3, back_at=200.0), constant({"a": 50.0, "b": 40.0}))
    loop.run(900.0)
    _, *back = loop.moves
    times = [at_s for at_s, _, _ in back]
    assert times[0] >= 260.0
    assert all(later - sooner >= 10.0 for sooner, later in pairwise(times))
    assert all(moved <= 0.1 + 1e-3 for _, _, moved in back)
    assert loop.matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}
    assert times[-1] <= 330.0


def test_ten_seconds_without_a_cell_cost_a_region_its_own_requests_for_ten_seconds() -> None:
    loop = ClosedLoop(falls_at(60.0, 0.0, back_at=70.0), constant({"a": 50.0, "b": 20.0}))
    loop.run(68.0)
    assert loop.matrix == {"a": {"b": 1.0}, "b": {"b": 1.0}}
    loop.run(74.0)
    assert loop.moves[-1][1].kind is ShiftKind.RETURN
    assert loop.matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}
    assert "a has healthy cells again" in loop.moves[-1][1].reason
    assert len(loop.run(600.0).moves) == 2


def test_a_long_outage_ends_the_same_way_and_others_come_to_the_region_in_steps() -> None:
    def capacity(name: str, at_s: float) -> float:
        return {"a": 0.0 if 60 <= at_s < 400 else 100.0, "b": 100.0 if at_s < 402 else 50.0}[name]

    loop = ClosedLoop(capacity, constant({"a": 20.0, "b": 60.0}))
    loop.run(404.0)
    home = [at_s for at_s, shift, _ in loop.moves if shift.kind is ShiftKind.RETURN]
    assert home == [400.0]
    loop.run(440.0)
    assert loop.matrix["a"] == {"a": 1.0}
    assert "a" not in loop.matrix["b"], "nothing of others goes to what has just come back"


def test_requests_come_home_though_two_regions_fell_together() -> None:
    def capacity(name: str, at_s: float) -> float:
        return {"a": 0.0 if 60 <= at_s < 70 else 100.0, "b": 0.0 if 64 <= at_s < 74 else 100.0}[name]

    loop = ClosedLoop(capacity, constant({"a": 50.0, "b": 20.0}))
    loop.run(66.0)
    assert loop.matrix["a"] == {"b": 1.0}
    loop.run(80.0)
    assert "several regions" in loop.holds[-1][1]
    assert loop.matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}


def test_a_region_that_comes_and_goes_gets_its_own_requests_back_once_a_minute_at_most() -> None:
    loop = ClosedLoop(
        lambda name, at_s: 0.0 if name == "a" and at_s > 60 and at_s % 20 < 10 else 100.0,
        constant({"a": 45.0, "b": 20.0}),
    )
    loop.run(660.0)
    times = [at_s for at_s, shift, _ in loop.moves if shift.kind is ShiftKind.RETURN]
    assert len(times) <= 2
    assert loop.movement() <= 4.0


def test_a_capacity_that_flaps_every_twenty_seconds_for_ten_minutes_moves_requests_once() -> None:
    loop = ClosedLoop(
        lambda name, at_s: 33.3 if name == "a" and at_s > 60 and at_s % 40 < 20 else 100.0,
        constant({"a": 45.0, "b": 40.0}),
    )
    loop.run(660.0)
    assert len(loop.moves) == 1
    assert loop.movement() <= 0.5
    assert loop.utilisation("b") <= 0.8


def test_noisy_demand_at_the_edge_of_the_cap_does_not_swing() -> None:
    """A demand that wavers by 5 % around 80 % of capacity, as arrivals of a busy region do."""
    wobble = [0.0, 2.1, -1.7, 3.9, -4.0, 1.2, -0.4, 4.0, -3.1, 0.8]
    loop = ClosedLoop(HUNDRED, lambda name, at_s: 79.0 + wobble[int(at_s / 2) % 10] if name == "a" else 30.0)
    loop.run(600.0)
    assert loop.movement() <= 0.12
    assert loop.utilisation("b") <= 0.8


def test_a_surge_spills_within_seconds_and_goes_home_in_steps_after_it() -> None:
    loop = ClosedLoop(HUNDRED, lambda name, at_s: 120.0 if name == "a" and 100 <= at_s < 300 else 40.0)
    loop.run(120.0)
    assert loop.moves[0][0] <= 110.0
    assert loop.matrix["a"]["b"] >= 1 - 80 / 120 - 0.03
    assert loop.utilisation("b") <= 0.8
    loop.run(700.0)
    assert loop.matrix["a"] == {"a": 1.0}


@pytest.mark.parametrize(("mode", "within_s"), [(EvacuationMode.REAL, 2.0), (EvacuationMode.DRILL, 102.0)])
def test_an_evacuated_region_serves_nothing_until_the_order_ends(mode: EvacuationMode, within_s: float) -> None:
    order = OverrideView(1, OverrideKind.EVACUATION, "", "a", NOW + timedelta(seconds=300), mode=mode)
    loop = ClosedLoop(HUNDRED, constant({"a": 30.0, "b": 30.0, "c": 30.0}), ABC, overrides=(order,))
    loop.run(within_s)
    assert loop.utilisation("a") == 0.0
    assert loop.utilisation("b") <= 0.8
    loop.run(298.0)
    assert loop.utilisation("a") == 0.0
    loop.run(420.0)
    assert loop.matrix["a"] == {"a": 1.0}
    assert all(moved <= 0.1 + 1e-3 for at_s, _, moved in loop.moves if at_s >= 300)


def test_an_evacuated_region_stays_empty_though_its_only_other_region_has_just_come_back() -> None:
    order = OverrideView(1, OverrideKind.EVACUATION, "", "a", NOW + timedelta(seconds=300), mode=EvacuationMode.REAL)
    loop = ClosedLoop(falls_at(20.0, 0.0, name="b", back_at=30.0), constant({"a": 30.0, "b": 30.0}))
    loop.run(34.0)
    assert loop.matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}
    loop.overrides = (order,)
    while loop.run(loop.at_s + 2.0).at_s < 298.0:
        assert loop.matrix == {"a": {"b": 1.0}, "b": {"b": 1.0}}


def test_a_silent_region_holds_everything_until_it_is_heard_again() -> None:
    loop = ClosedLoop(
        falls_at(100.0, 20.0, name="b"),
        constant({"a": 30.0, "b": 40.0, "c": 10.0}),
        ABC,
        silent=lambda name, at_s: name == "c" and 60 <= at_s < 160,
    )
    loop.run(158.0)
    assert loop.moves == []
    assert "no fresh report: c" in loop.holds[-1][1]
    loop.run(164.0)
    assert loop.moves[0][1].kind is ShiftKind.RELIEF


def test_two_regions_that_fall_together_are_believed_after_a_minute() -> None:
    def capacity(name: str, at_s: float) -> float:
        return 30.0 if name in ("a", "b") and at_s >= 60 else 100.0

    loop = ClosedLoop(capacity, constant({"a": 40.0, "b": 10.0, "c": 10.0}), ABC)
    loop.run(118.0)
    assert loop.moves == []
    assert "several regions" in loop.holds[-1][1]
    loop.run(126.0)
    assert loop.moves[0][1].kind is ShiftKind.RELIEF
    assert loop.utilisation("c") <= 0.8
