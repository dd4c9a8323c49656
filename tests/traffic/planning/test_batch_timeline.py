"""Samples of a batch: a bounded number, in order, and what follows from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.batch_timeline import (
    FIRST_STEP_S,
    MOST_SAMPLES,
    Timeline,
    actual_rates,
    add_sample,
    needed_lines,
    needed_rates,
)


def sampled(*looks: tuple[float, int]) -> Timeline:
    timeline = Timeline()
    for at_s, done in looks:
        timeline = add_sample(timeline, at_s, done, 0) or timeline
    return timeline


def test_each_step_has_its_first_look_and_gaps_stay_gaps() -> None:
    assert sampled((0, 0), (10, 5), (31, 9), (125, 40)).completed == (0, 9, None, None, 40)


def test_a_full_grid_keeps_every_second_sample_and_doubles_its_step() -> None:
    looks = [(number * FIRST_STEP_S, number) for number in range(MOST_SAMPLES + 1)]
    timeline = sampled(*looks)
    assert timeline.step_s == 2 * FIRST_STEP_S
    assert timeline.completed == tuple(range(0, MOST_SAMPLES + 1, 2))


def test_a_process_that_was_away_for_days_leaves_a_gap_of_bounded_length() -> None:
    timeline = sampled((0, 0), (30, 1), (7 * 86_400, 900))
    assert len(timeline.completed) <= MOST_SAMPLES
    assert (timeline.completed[0], timeline.completed[-1]) == (0, 900)


def test_a_clock_that_went_back_adds_nothing() -> None:
    assert add_sample(sampled((0, 0), (30, 1)), -5.0, 1, 0) is None


def test_rates_are_over_what_is_known() -> None:
    timeline = Timeline(30, (0, 30, None, 150), (0, 0, None, 0))
    assert actual_rates(timeline) == (None, 1.0, None, 2.0)


def test_what_is_needed_leaves_a_tenth_of_the_window() -> None:
    timeline = Timeline(30, (0, 30, 90), (0, 0, 0))
    assert needed_lines(timeline, 900, 1000.0) == pytest.approx((0.0, 30.0, 60.0))
    assert needed_rates(timeline, 900, 1000.0) == pytest.approx((1.0, 1.0, 810 / 840))


def test_nothing_is_needed_once_its_time_is_over() -> None:
    timeline = Timeline(30, (0, 1, 2), (0, 0, 0))
    assert needed_rates(timeline, 9, 50.0) == (0.2, 8 / 15, None)


@given(st.lists(st.tuples(st.floats(0, 3e6), st.integers(0, 1000)), max_size=200))
def test_it_is_never_longer_than_a_figure_and_never_goes_back(looks: list[tuple[float, int]]) -> None:
    ordered = sorted(looks)
    counts = sorted(done for _, done in looks)
    timeline = sampled(*((at_s, done) for (at_s, _), done in zip(ordered, counts, strict=True)))
    assert len(timeline.completed) == len(timeline.failed) <= MOST_SAMPLES
    known = [one for one in timeline.completed if one is not None]
    assert known == sorted(known)
    assert all(rate is None or rate >= 0 for rate in actual_rates(timeline))
