"""N+1: which deployments lack room if a region is lost at the peak of the next day."""

from datetime import UTC, datetime, timedelta

from traffic.region_shares.planning.losses import (
    FACTOR_STEP,
    HIGHEST_FACTOR,
    ExpectedDeployment,
    ExpectedPlace,
    Shortage,
    Stress,
    plan_region_losses,
    plan_stress,
)
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import TrafficPolicy

AT = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
EAST, WEST, EU = "us-east-1", "us-west-2", "eu-west-1"
LATENCY = latencies_ms((EAST, WEST, EU), {})


def losses(
    demand: dict[str, list[float]], capacity: dict[str, float], policy: TrafficPolicy | None = None
) -> dict[str, tuple[Shortage, ...]]:
    places = {
        region: ExpectedPlace(loads, [capacity.get(region, 0.0)] * len(loads)) for region, loads in demand.items()
    }
    one = ExpectedDeployment("chat", AT, 900, places, policy or TrafficPolicy())
    found = plan_region_losses([one], LATENCY)
    return {
        region: tuple(Shortage(row.deployment, row.at, row.load, round(row.unplaced, 1)) for row in rows)
        for region, rows in found.items()
    }


def test_the_peak_slot_decides_and_four_fifths_of_the_rest_are_room() -> None:
    found = losses({EAST: [10, 40], WEST: [10, 20]}, {EAST: 100, WEST: 50})
    assert found == {
        EAST: (Shortage("chat", AT + timedelta(seconds=900), 60, 20.0),),  # 60 requests, room for 0.8 * 50
        WEST: (),
    }


def test_a_region_without_cells_is_missed_by_no_request() -> None:
    assert losses({EAST: [10], EU: [5]}, {EAST: 100})[EU] == ()


def test_requests_that_must_stay_at_home_break_with_it() -> None:
    kept = TrafficPolicy(residency={EU: (EU,)})
    found = losses({EAST: [1], EU: [30]}, {EAST: 1000, EU: 100}, kept)
    assert found == {EAST: (), EU: (Shortage("chat", AT, 31, 30.0),)}


def test_what_lacks_room_in_any_case_is_not_counted_as_lost() -> None:
    found = losses({EAST: [100], WEST: [0]}, {EAST: 50, WEST: 50})
    assert found[WEST] == (Shortage("chat", AT, 100, 40.0),)
    assert found[EAST] == (Shortage("chat", AT, 100, 40.0),)


def test_the_largest_shortage_comes_first() -> None:
    places = {EAST: ExpectedPlace([10], [100]), WEST: ExpectedPlace([10], [0])}
    larger = {EAST: ExpectedPlace([40], [100]), WEST: ExpectedPlace([10], [0])}
    rows = [ExpectedDeployment(name, AT, 900, one, TrafficPolicy()) for name, one in (("a", places), ("b", larger))]
    assert [row.deployment for row in plan_region_losses(rows, LATENCY)[EAST]] == ["b", "a"]


def stress(demand: dict[str, float], capacity: dict[str, float], factor: float, *lost: str) -> Stress:
    places = {region: ExpectedPlace([load], [capacity.get(region, 0.0)]) for region, load in demand.items()}
    (row,) = plan_stress(
        [ExpectedDeployment("chat", AT, 900, places, TrafficPolicy())], LATENCY, factor=factor, lost=lost
    )
    return row


def test_a_fleet_holds_until_its_room_is_used_up() -> None:
    row = stress({EAST: 40, WEST: 20}, {EAST: 100, WEST: 50}, 1.0)
    assert (row.breaks, row.load) == (False, 60)
    assert abs(row.holds_until - 2.0) <= FACTOR_STEP  # room for 0.8 * 150 of 60 requests
    beyond = stress({EAST: 40, WEST: 20}, {EAST: 100, WEST: 50}, 2.5)
    assert (beyond.breaks, round(beyond.unplaced)) == (True, 30)


def test_lost_regions_take_their_room_along() -> None:
    row = stress({EAST: 40, WEST: 20}, {EAST: 100, WEST: 50}, 1.0, EAST)
    assert row.breaks
    assert abs(row.holds_until - 40 / 60) <= FACTOR_STEP
    assert stress({EAST: 40, WEST: 20}, {EAST: 100, WEST: 50}, 1.0, EAST, WEST).holds_until == 0


def test_a_fleet_with_much_room_has_the_highest_factor_and_no_shortage() -> None:
    assert stress({EAST: 1}, {EAST: 1000}, 4.0) == Stress("chat", AT, 4.0, 0.0, HIGHEST_FACTOR)


def test_the_first_to_break_comes_first() -> None:
    places = [{EAST: ExpectedPlace([load], [100])} for load in (10, 70)]
    rows = [ExpectedDeployment(name, AT, 900, place, TrafficPolicy()) for name, place in zip("ab", places, strict=True)]
    assert [row.deployment for row in plan_stress(rows, LATENCY, factor=1.0, lost=())] == ["b", "a"]


def test_the_worst_moment_is_not_the_peak_of_the_load() -> None:
    kept = TrafficPolicy(residency={EAST: (EAST,)})
    places = {EAST: ExpectedPlace([90, 20], [100, 100]), WEST: ExpectedPlace([10, 60], [100, 100])}
    (row,) = plan_stress([ExpectedDeployment("chat", AT, 900, places, kept)], LATENCY, factor=1.0, lost=())
    assert (row.at, row.first) == (AT, EAST)
    (free,) = plan_stress(
        [ExpectedDeployment("chat", AT, 900, places, TrafficPolicy())], LATENCY, factor=1, lost=[EAST]
    )
    assert (free.at, free.breaks, free.first) == (AT, True, EAST)
    less = {**places, WEST: ExpectedPlace([10, 60], [100, 20])}
    (tight,) = plan_stress([ExpectedDeployment("chat", AT, 900, less, TrafficPolicy())], LATENCY, factor=1, lost=[EAST])
    assert (tight.at, tight.load, round(tight.unplaced)) == (AT + timedelta(seconds=900), 80, 64)


def test_the_first_region_without_room_is_named_before_it_breaks() -> None:
    kept = TrafficPolicy(residency={EU: (EU,)})
    places = {EAST: ExpectedPlace([10], [100]), EU: ExpectedPlace([40], [100])}
    (row,) = plan_stress([ExpectedDeployment("chat", AT, 900, places, kept)], LATENCY, factor=1.0, lost=())
    assert (row.breaks, row.first, round(row.holds_until, 1)) == (False, EU, 2.0)


def test_a_forecast_without_slots_is_left_out() -> None:
    empty = ExpectedDeployment("new", AT, 900, {EAST: ExpectedPlace([], [])}, TrafficPolicy())
    assert plan_stress([empty], LATENCY, factor=1.0, lost=()) == ()
    assert plan_region_losses([empty], LATENCY) == {}
