"""Single passes of the region autopilot, and previews of overrides."""

from datetime import timedelta

import pytest

from tests.traffic.region_shares.planning.steering import NOW, decide, region, shifted, utilisations, view
from traffic.region_shares.planning.autopilot import KeepTable, RegionView, ShiftKind, preview_override
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind, OverrideView, TrafficPolicy

LATER = NOW + timedelta(minutes=5)


def evacuation(name: str, mode: EvacuationMode) -> OverrideView:
    return OverrideView(1, OverrideKind.EVACUATION, "", name, LATER, mode=mode)


def test_a_fleet_at_home_with_headroom_stays_there() -> None:
    assert decide(view(region("a", 50, 100), region("b", 79, 100))) is None


def test_the_first_plan_is_taken_whole() -> None:
    shift = shifted(view(region("a", 50, 100), region("b", 50, 100), in_force={}))
    assert (shift.kind, shift.matrix) == (ShiftKind.FIRST, {"a": {"a": 1.0}, "b": {"b": 1.0}})
    assert shift.moved == 0


def test_a_region_that_lost_two_thirds_is_relieved_in_one_step_within_caps() -> None:
    seen = view(region("a", 60, 34, lost=0.66), region("b", 30, 100), region("c", 30, 100))
    shift = shifted(seen)
    assert shift.kind is ShiftKind.RELIEF
    # 95 % of 80 % of 34 stay; the rest fits into b, the nearest.
    assert shift.matrix["a"] == {"a": pytest.approx(0.4307, abs=1e-3), "b": pytest.approx(0.5693, abs=1e-3)}
    assert shift.matrix["b"] == {"b": 1.0}
    assert max(utilisations(seen, shift.matrix).values()) <= 0.8
    assert shift.moved == pytest.approx(0.5693 / 2, abs=1e-3)
    assert "a has 60.0 concurrent requests and a tested capacity of 34" in shift.reason
    assert "a -> b 56.9%, a 43.1%" in shift.reason


def test_a_spill_continues_to_the_next_region_when_the_nearest_is_full() -> None:
    shift = shifted(view(region("a", 60, 34), region("b", 60, 100), region("c", 30, 100)))
    row = shift.matrix["a"]
    assert row["b"] == pytest.approx((76 - 60) / 60, abs=1e-3)
    assert row["c"] == pytest.approx(1 - row["a"] - row["b"], abs=1e-3)


def test_a_region_without_a_healthy_cell_sends_everything_away() -> None:
    shift = shifted(view(region("a", 30, 0, lost=1.0), region("b", 30, 100)))
    assert shift.matrix["a"] == {"b": 1.0}
    assert "a has no healthy cell" in shift.reason


def test_load_that_fits_nowhere_stays_at_home() -> None:
    seen = view(region("a", 100, 30, lost=0.7), region("b", 70, 100))
    shift = shifted(seen)
    assert utilisations(seen, shift.matrix)["b"] <= 0.8
    assert shift.matrix["a"]["a"] == pytest.approx(0.9, abs=0.01)


def test_a_home_that_cannot_serve_at_all_spreads_its_surplus_by_capacity() -> None:
    shift = shifted(view(region("a", 90, 0, lost=1.0), region("b", 76, 100), region("c", 38, 50)))
    assert shift.matrix["a"]["b"] == pytest.approx(2 / 3, abs=0.02)
    assert "a" not in shift.matrix["a"]


def test_the_way_home_takes_ten_points_and_waits_ten_seconds() -> None:
    away = {"a": {"a": 0.4, "b": 0.6}, "b": {"b": 1.0}}
    regions = (region("a", 50, 100), region("b", 20, 100))
    assert decide(view(*regions, in_force=away, moved_s_ago=8)) is None
    shift = shifted(view(*regions, in_force=away, moved_s_ago=10))
    assert (shift.kind, shift.matrix["a"]) == (ShiftKind.STEP, {"a": 0.5, "b": 0.5})


def test_capacity_that_has_just_come_back_is_not_counted_on_yet() -> None:
    away = {"a": {"a": 0.51, "b": 0.49}, "b": {"b": 1.0}}
    assert decide(view(region("a", 50, 34, now=100), region("b", 20, 100), in_force=away)) is None


def test_a_region_that_starts_keeps_what_it_carries_though_its_minute_has_not_passed() -> None:
    assert decide(view(region("a", 50, 0, now=100), region("b", 20, 100))) is None


def test_a_region_whose_first_cell_is_still_coming_keeps_its_share() -> None:
    """Its ingress spills meanwhile. Requests that were sent away would return in steps."""
    assert decide(view(region("a", 20, 0, starting=True), region("b", 20, 0, now=50))) is None


def test_nothing_goes_to_a_region_that_has_no_cell_yet() -> None:
    """After the first minute without a cell anywhere, requests wait at home for the first cell."""
    assert decide(view(region("a", 20, 0), region("b", 20, 0, starting=True))) is None
    away = {"a": {"b": 1.0}, "b": {"b": 1.0}}
    home = shifted(view(region("a", 20, 100), region("b", 20, 0, starting=True), in_force=away))
    assert home.matrix["a"] == {"a": 0.1, "b": 0.9}, "load that is elsewhere returns in steps"


@pytest.mark.parametrize("other", [region("a", 0, 0, starting=True), region("a", 20, 100)])
def test_a_new_origin_that_starts_is_at_home_whatever_the_others_have(other: RegionView) -> None:
    seen = view(other, region("b", 0, 0, starting=True), in_force={"a": {"a": 1.0}})
    assert shifted(seen).matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}
    shift = shifted(view(region("a", 20, 0), region("b", 20, 50)))
    assert shift.matrix["a"] == {"b": 1.0}, "a region without a cell for a whole minute keeps nothing"


def test_less_than_a_point_is_left_where_it_is() -> None:
    away = {"a": {"a": 0.995, "b": 0.005}, "b": {"b": 1.0}}
    assert decide(view(region("a", 20, 100), region("b", 20, 100), in_force=away)) is None


def test_a_live_region_keeps_one_per_cent_of_its_own() -> None:
    shift = shifted(
        view(
            region("a", 30, 100),
            region("b", 10, 100),
            in_force={"a": {"a": 0.05, "b": 0.95}, "b": {"b": 1.0}},
            policy=TrafficPolicy(cost={"a": 4.0, "b": 1.0}),
        )
    )
    assert shift.matrix["a"] == {"a": 0.01, "b": 0.99}


@pytest.mark.parametrize("heard", [None, 16.0])
def test_stale_reports_hold_the_last_table(heard: float | None) -> None:
    decision = decide(view(region("a", 60, 34, lost=0.66), region("b", 30, 100, heard_s_ago=heard)))
    assert isinstance(decision, KeepTable)
    assert "no fresh report: b" in decision.reason


def test_two_regions_going_bad_together_hold_the_last_table() -> None:
    decision = decide(view(region("a", 60, 34, lost=0.66), region("b", 60, 40, lost=0.6), region("c", 1, 100)))
    assert isinstance(decision, KeepTable)
    assert decision.reason == "several regions lost capacity within a minute: a 66%, b 60%"


def test_while_held_an_operator_is_still_obeyed() -> None:
    fixed = OverrideView(1, OverrideKind.SHARES, "llama", "a", LATER, shares={"a": 0.25, "b": 0.75})
    seen = view(region("a", 10, 100, heard_s_ago=60), region("b", 10, 100), overrides=(fixed,))
    shift = shifted(seen)
    assert (shift.kind, shift.matrix["a"]) == (ShiftKind.ORDERED, {"a": 0.25, "b": 0.75})


def test_an_override_that_has_expired_holds_no_more_and_the_way_back_is_taken_in_steps() -> None:
    fixed = OverrideView(1, OverrideKind.SHARES, "llama", "a", NOW, shares={"a": 0.25, "b": 0.75})
    row = {"a": 0.25, "b": 0.75}
    shift = shifted(
        view(region("a", 10, 100), region("b", 10, 100), in_force={"a": row, "b": {"b": 1.0}}, overrides=(fixed,))
    )
    assert shift.matrix["a"] == {"a": 0.3438, "b": 0.6562}, "the first of eight equal steps"


def test_an_override_of_another_deployment_changes_nothing() -> None:
    fixed = OverrideView(1, OverrideKind.SHARES, "other", "a", LATER, shares={"b": 1.0})
    assert decide(view(region("a", 10, 100), region("b", 10, 100), overrides=(fixed,))) is None


def test_an_evacuation_for_real_takes_everything_out_at_once_even_what_does_not_fit() -> None:
    seen = view(region("a", 60, 100), region("b", 60, 100), overrides=(evacuation("a", EvacuationMode.REAL),))
    shift = shifted(seen)
    assert (shift.kind, shift.matrix["a"]) == (ShiftKind.ORDERED, {"b": 1.0})
    assert "a is evacuated" in shift.reason


@pytest.mark.parametrize(
    ("home", "ordered"),
    [(region("a", 20, 100), (evacuation("a", EvacuationMode.REAL),)), (region("a", 20, 0), ())],
    ids=["evacuated", "without-cell"],
)
def test_what_can_be_served_nowhere_else_goes_to_a_region_that_had_no_cell_a_moment_ago(
    home: RegionView, ordered: tuple[OverrideView, ...]
) -> None:
    back = region("b", 20, 0, now=100, returned=True)
    shift = shifted(view(home, back, overrides=ordered))
    assert shift.matrix == {"a": {"b": 1.0}, "b": {"b": 1.0}}
    assert decide(view(home, back, overrides=ordered, in_force=shift.matrix)) is None


def test_an_evacuation_sends_nothing_to_a_region_that_had_no_cell_a_moment_ago_while_others_have_room() -> None:
    order = (evacuation("a", EvacuationMode.REAL),)
    back, well = region("b", 20, 0, now=100, returned=True), region("c", 20, 100)
    assert shifted(view(region("a", 20, 100), back, well, overrides=order)).matrix["a"] == {"c": 1.0}


def test_a_drill_takes_steps_and_only_what_fits() -> None:
    drill = (evacuation("a", EvacuationMode.DRILL),)
    shift = shifted(view(region("a", 60, 100), region("b", 60, 100), overrides=drill))
    assert shift.matrix["a"] == {"a": 0.9112, "b": 0.0888}, "the first of three equal steps"
    full = {"a": {"a": 0.74, "b": 0.26}, "b": {"b": 1.0}}
    assert decide(view(region("a", 60, 100), region("b", 60, 100), overrides=drill, in_force=full)) is None


def test_what_residency_keeps_in_a_region_stays_there_though_it_is_evacuated() -> None:
    policy = TrafficPolicy(residency={"a": ("a",)})
    overrides = (evacuation("a", EvacuationMode.REAL),)
    assert decide(view(region("a", 10, 100), region("b", 10, 100), policy=policy, overrides=overrides)) is None


def test_a_new_residency_is_obeyed_at_once() -> None:
    away = {"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}}
    policy = TrafficPolicy(residency={"a": ("a", "c")})
    shift = shifted(view(region("a", 10, 100), region("b", 10, 100), region("c", 0, 100), in_force=away, policy=policy))
    assert shift.matrix["a"] == {"a": 1.0}
    assert "residency keeps requests of a out of b" in shift.reason


def test_room_that_only_another_can_use_is_left_to_it() -> None:
    """b is nearest to both, but only d's requests have no alternative."""
    policy = TrafficPolicy(residency={"d": ("b", "d")})
    seen = view(
        region("a", 40, 0, lost=1.0), region("b", 20, 100), region("c", 20, 100), region("d", 50, 0), policy=policy,
        in_force={"a": {"a": 1.0}, "b": {"b": 1.0}, "c": {"c": 1.0}, "d": {"b": 1.0}},
    )  # fmt: skip
    shift = shifted(seen)
    assert shift.matrix["d"] == {"b": 1.0}
    assert max(utilisations(seen, shift.matrix).values()) <= 0.8


def test_a_cheaper_region_nearby_is_filled_to_its_share_in_steps() -> None:
    policy = TrafficPolicy(cost={"a": 2.0, "b": 1.0, "c": 0.5}, cost_latency_ms=15)
    regions = (region("a", 50, 100), region("b", 40, 100), region("c", 0, 100))
    assert shifted(view(*regions, policy=policy)).matrix["a"] == {"a": 0.9, "b": 0.1}
    filled = {"a": {"a": 0.6, "b": 0.4}, "b": {"b": 1.0}, "c": {"c": 1.0}}
    assert decide(view(*regions, policy=policy, in_force=filled)) is None


def test_a_cheaper_region_without_headroom_gets_nothing() -> None:
    policy = TrafficPolicy(cost={"a": 2.0})
    assert decide(view(region("a", 50, 100), region("b", 61, 100), policy=policy)) is None


def test_a_region_that_is_gone_gets_nothing_and_its_row_goes() -> None:
    gone = {"a": {"a": 0.5, "z": 0.5}, "z": {"z": 1.0}}
    shift = shifted(view(region("a", 10, 100), region("b", 10, 100), in_force={**gone, "b": {"b": 1.0}}))
    assert shift.matrix == {"a": {"a": 1.0}, "b": {"b": 1.0}}
    assert "z no longer has an ingress" in shift.reason


IN_AN_HOUR = NOW + timedelta(hours=1)


def evacuating(name: str, mode: EvacuationMode = EvacuationMode.DRILL) -> OverrideView:
    return OverrideView(9, OverrideKind.EVACUATION, "", name, IN_AN_HOUR, mode=mode)


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
    order = OverrideView(9, OverrideKind.SHARES, "llama", "a", IN_AN_HOUR, shares={"b": 3.0, "a": 1.0})
    policy = TrafficPolicy(residency={"b": ("b",)})
    effect = preview_override(view(region("a", 60, 100), region("b", 50, 100), policy=policy), order, NOW)
    assert effect.matrix["a"] == {"a": 0.25, "b": 0.75}
    assert effect.over_cap == ("b",)
    assert effect.regions[1].utilisation_after == pytest.approx(0.95)


def test_a_region_without_cells_has_no_utilisation() -> None:
    effect = preview_override(view(region("a", 10, 0), region("b", 10, 100)), evacuating("a"), NOW)
    assert (effect.regions[0].utilisation_before, effect.regions[0].utilisation_after) == (None, None)


def test_a_region_that_is_filled_by_order_makes_room_by_sending_its_own_elsewhere() -> None:
    order = OverrideView(9, OverrideKind.SHARES, "llama", "a", IN_AN_HOUR, shares={"b": 3.0, "a": 1.0})
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
