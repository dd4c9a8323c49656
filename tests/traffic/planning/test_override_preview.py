"""What an order would do, before anybody gives it."""

from datetime import timedelta

import pytest

from tests.traffic.planning.steering import NOW, region, view
from traffic.planning.override_preview import preview_override
from traffic.planning.overrides import EvacuationMode, OverrideKind, OverrideView
from traffic.planning.traffic_policy import TrafficPolicy

LATER = NOW + timedelta(hours=1)


def evacuating(name: str, mode: EvacuationMode = EvacuationMode.DRILL) -> OverrideView:
    return OverrideView(9, OverrideKind.EVACUATION, "", name, LATER, mode=mode)


def test_it_says_who_receives_what_and_how_full_they_are_then() -> None:
    effect = preview_override(
        view(region("a", 40, 100), region("b", 50, 100), region("c", 10, 50)), evacuating("a"), NOW
    )
    a, b, c = effect.regions
    assert [one.receives for one in (a, b, c)] == pytest.approx([-40, 26, 14], abs=0.1)
    assert a.load_after == pytest.approx(0, abs=0.01)
    assert b.utilisation_after == pytest.approx(0.76, abs=0.01)
    assert c.utilisation_before == pytest.approx(0.2)
    assert effect.unplaced == {}
    assert effect.over_cap == ()


def test_a_drill_keeps_at_home_what_fits_nowhere() -> None:
    effect = preview_override(view(region("a", 60, 100), region("b", 60, 100)), evacuating("a"), NOW)
    assert effect.matrix["a"]["a"] == pytest.approx(44 / 60, abs=1e-3)
    assert effect.unplaced == {}
    assert effect.over_cap == ()


@pytest.mark.parametrize("mode", EvacuationMode)
def test_a_region_that_had_no_cell_a_moment_ago_receives_what_it_holds_now(mode: EvacuationMode) -> None:
    back = region("b", 20, 0, now=100, returned=True)
    effect = preview_override(view(region("a", 20, 100), back), evacuating("a", mode), NOW)
    assert effect.matrix["a"] == {"b": 1.0}
    assert (effect.unplaced, effect.over_cap) == ({}, ())


def test_for_real_it_says_who_would_be_overloaded_and_by_how_much_too_much_leaves() -> None:
    effect = preview_override(
        view(region("a", 60, 100), region("b", 60, 100)), evacuating("a", EvacuationMode.REAL), NOW
    )
    assert effect.matrix["a"] == {"b": 1.0}
    assert effect.unplaced == {"a": pytest.approx(40, abs=0.01)}
    assert effect.over_cap == ("b",)


def test_what_may_go_nowhere_stays_and_is_said() -> None:
    policy = TrafficPolicy(residency={"a": ("a",)})
    seen = view(region("a", 60, 100), region("b", 10, 100), policy=policy)
    effect = preview_override(seen, evacuating("a", EvacuationMode.REAL), NOW)
    assert effect.matrix["a"] == {"a": 1.0}
    assert effect.unplaced == {"a": pytest.approx(60)}


def test_fixed_shares_are_taken_as_they_are_and_their_overload_is_said() -> None:
    order = OverrideView(9, OverrideKind.SHARES, "llama", "a", LATER, shares={"b": 3.0, "a": 1.0})
    policy = TrafficPolicy(residency={"b": ("b",)})
    effect = preview_override(view(region("a", 60, 100), region("b", 50, 100), policy=policy), order, NOW)
    assert effect.matrix["a"] == {"a": 0.25, "b": 0.75}
    assert effect.over_cap == ("b",)
    assert effect.regions[1].utilisation_after == pytest.approx(0.95)


def test_a_region_without_cells_has_no_utilisation() -> None:
    effect = preview_override(view(region("a", 10, 0), region("b", 10, 100)), evacuating("a"), NOW)
    assert (effect.regions[0].utilisation_before, effect.regions[0].utilisation_after) == (None, None)


def test_a_region_that_is_filled_by_order_makes_room_by_sending_its_own_elsewhere() -> None:
    order = OverrideView(9, OverrideKind.SHARES, "llama", "a", LATER, shares={"b": 3.0, "a": 1.0})
    effect = preview_override(view(region("a", 60, 100), region("b", 50, 100)), order, NOW)
    assert effect.matrix["b"]["a"] == pytest.approx((95 - 76) / 50, abs=1e-3)
    assert effect.over_cap == ()


def test_capacity_that_has_just_come_counts_and_an_idle_origin_misses_no_room() -> None:
    effect = preview_override(
        view(region("a", 40, 100), region("b", 0, 0, now=100)), evacuating("a", EvacuationMode.REAL), NOW
    )
    assert (effect.unplaced, effect.over_cap) == ({}, ())
    idle = preview_override(view(region("a", 0, 100), region("b", 0, 0)), evacuating("a"), NOW)
    assert idle.unplaced == {}
