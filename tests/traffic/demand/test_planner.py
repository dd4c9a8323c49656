"""Demand by origin and class, and concurrency for queued work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, SeriesKey
from traffic.demand.planner import (
    LEAST_LEFT_S,
    PoolSample,
    QueuedWork,
    SlotMeans,
    batch_work_share,
    origin_loads,
    requests_at_once,
    series_loads,
    slot_of,
    work_until,
)

EAST, WEST, NORTH = "east", "west", "north"
KEY = SeriesKey("chat", EAST, "realtime")
PLACE = ("chat", EAST)
BEGAN_S = 7 * HISTORY_SLOT_S


def test_what_a_region_sent_away_is_its_own_load() -> None:
    pools = {EAST: PoolSample(10.0, sent=6.0, sent_to={WEST: 40.0}), WEST: PoolSample(9.0)}

    assert origin_loads(pools, {}) == {EAST: 16.0, WEST: 3.0}


def test_what_is_away_lies_where_it_went_lately() -> None:
    before = {EAST: PoolSample(0.0, sent=0.0, sent_to={WEST: 100.0, NORTH: 0.0})}
    pools = {
        EAST: PoolSample(0.0, sent=8.0, sent_to={WEST: 102.0, NORTH: 6.0}),
        WEST: PoolSample(5.0),
        NORTH: PoolSample(7.0),
    }

    assert origin_loads(pools, before) == {EAST: 8.0, WEST: 3.0, NORTH: 1.0}


def test_what_a_silent_region_sends_counts_where_it_is_served() -> None:
    assert origin_loads({WEST: PoolSample(9.0)}, {}) == {WEST: 9.0}


@given(
    st.dictionaries(
        st.sampled_from([EAST, WEST, NORTH]),
        st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e6), st.floats(0, 1e6)),
    )
)
def test_loads_are_never_below_zero(told: dict[str, tuple[float, float, float, float]]) -> None:
    others = {EAST: (WEST, NORTH), WEST: (EAST, NORTH), NORTH: (EAST, WEST)}
    pools = {
        region: PoolSample(here, sent, dict(zip(others[region], (one, other), strict=True)))
        for region, (here, sent, one, other) in told.items()
    }

    assert all(load >= 0 for load in origin_loads(pools, {}).values())


@pytest.mark.parametrize(
    ("in_cells", "split"),
    [
        ({PLACE: {"realtime": 3.0, "batch": 1.0}}, {"realtime": 9.0, "batch": 3.0}),
        ({PLACE: {"realtime": 0.0}, ("chat", WEST): {"batch": 5.0}}, {"realtime": 0.0, "batch": 12.0}),
        ({("other", EAST): {"batch": 5.0}}, {"realtime": 12.0}),
        ({}, {"realtime": 12.0}),
    ],
)
def test_classes_are_told_apart_by_the_cells_there_or_anywhere(
    in_cells: dict[tuple[str, str], dict[str, float]], split: dict[str, float]
) -> None:
    loads = series_loads("chat", "realtime", {EAST: 12.0}, in_cells)

    assert loads == {SeriesKey("chat", EAST, name): load for name, load in split.items()}


def seen(looks: list[tuple[float, float]]) -> SlotMeans:
    slot = SlotMeans(7)
    for after_s, load in looks:
        slot.add(BEGAN_S + after_s, [PLACE], {KEY: load})
    return slot


def test_a_slot_has_the_mean_of_its_looks_by_their_time() -> None:
    looks = [(float(at), 10.0) for at in range(10, 151, 10)] + [(float(at), 20.0) for at in range(155, 301, 5)]

    assert seen(looks).means([]) == {KEY: 15.0}


def test_a_slot_that_was_not_seen_whole_is_a_hole() -> None:
    assert seen([(float(at), 10.0) for at in range(10, 231, 10)]).means([KEY]) == {}
    assert seen([(10.0, 10.0), (299.0, 10.0)]).means([KEY]) == {}


def test_a_known_series_without_load_has_a_zero_and_an_unknown_one_nothing() -> None:
    slot = seen([(float(at), 0.0) for at in range(10, 301, 10)])

    assert slot.means([]) == {}
    assert slot.means([KEY]) == {KEY: 0.0}


def test_a_clock_that_goes_back_adds_nothing() -> None:
    slot = seen([(float(at), 10.0) for at in range(10, 301, 10)])
    slot.add(BEGAN_S + 5.0, [PLACE], {KEY: 1e9})

    assert slot.means([]) == {KEY: 10.0}


def test_slots_are_numbered_since_1970() -> None:
    assert [slot_of(at) for at in (0.0, 299.9, 300.0)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("cells", "share"),
    [
        ([], 0.0),
        ([{}], 0.0),
        ([{"realtime": 3.0}], 0.0),
        ([{"realtime": 1.0, "batch": 3.0}], 0.75),
        ([{"realtime": 4.0}, {"batch": 4.0}, {}], 0.5),
        ([{"realtime": 4.0}, {"realtime": 4.0}, {"realtime": 4.0}, {"batch": 1e9}], 0.25),
    ],
)
def test_a_cell_moves_the_share_of_guests_by_its_own_part(cells: list[dict[str, float]], share: float) -> None:
    assert batch_work_share(cells) == pytest.approx(share)


@pytest.mark.parametrize(
    ("work", "service_s", "at_once"),
    [
        (QueuedWork(), 5.0, 0.0),
        (work_until(3600, 3600.0), 5.0, 5.0),
        (work_until(3600, 3600.0) + work_until(600, 300.0), 5.0, 15.0),
        (work_until(2, 1.0), 600.0, 2.0),
        (work_until(5000, 3600.0), None, 1.0),
    ],
)
def test_by_the_time_that_is_left(work: QueuedWork, service_s: float | None, at_once: float) -> None:
    assert requests_at_once(work, service_s) == pytest.approx(at_once)


def test_a_deadline_that_is_past_asks_for_no_more_than_one_that_is_near() -> None:
    assert work_until(10, -5.0) == work_until(10, LEAST_LEFT_S)
