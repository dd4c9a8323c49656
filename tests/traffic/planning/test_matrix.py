"""Rows that sum to 1, distances, and steps between rows."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from traffic.planning.matrix import distance, loads, movement, step_towards, whole_row

rows = st.dictionaries(st.sampled_from("abcd"), st.floats(0.001, 100.0), min_size=1)


@given(row=rows)
def test_a_whole_row_sums_to_one_and_stays_close(row: dict[str, float]) -> None:
    whole = whole_row(row, "a")
    total = math.fsum(row.values())
    assert math.isclose(math.fsum(whole.values()), 1.0, abs_tol=1e-12)
    assert distance(whole, {region: share / total for region, share in row.items()}) <= 4e-4
    assert whole_row(whole, "a") == whole


def test_what_rounding_leaves_over_stays_at_home_or_with_the_greatest() -> None:
    thirds = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert whole_row(thirds, "b") == {"a": 0.3333, "b": 0.3334, "c": 0.3333}
    assert whole_row(thirds, "z") == {"a": 0.3333, "b": 0.3333, "c": 0.3334}


@pytest.mark.parametrize("row", [{}, {"a": 0.0}, {"a": -1.0}])
def test_a_row_of_nothing_is_refused(row: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no share above 0"):
        whole_row(row, "a")


def test_distance_is_the_share_that_goes_elsewhere() -> None:
    assert distance({"a": 1.0}, {"b": 1.0}) == 1.0
    assert distance({"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}) == 0.25


def test_movement_is_of_all_requests() -> None:
    before = {"a": {"a": 1.0}, "b": {"b": 1.0}}
    after = {"a": {"b": 1.0}, "b": {"b": 1.0}, "new": {"b": 1.0}}
    assert movement(before, after, {"a": 30.0, "b": 60.0, "new": 10.0}) == pytest.approx(0.3)
    assert movement(before, after, {}) == 0.0


def test_loads_add_up() -> None:
    assert loads({"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}}, {"a": 10.0, "b": 4.0}) == {"a": 5.0, "b": 9.0}


@given(row=rows, target=rows)
@example(row={"a": 1.0}, target={"b": 1.0, "c": 2.0})
def test_equal_steps_arrive(row: dict[str, float], target: dict[str, float]) -> None:
    here, there = whole_row(row, "a"), whole_row(target, "a")
    for _ in range(math.ceil(distance(here, there) / 0.1) + 1):  # rounding may cost a step
        before, here = here, step_towards(here, there, 0.1, "a")
        assert distance(before, here) <= 0.1 + 4e-4
    assert distance(here, there) <= 1e-3
