"""Percentiles from buckets, against the true ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.histogram import SlidingHistogram
from engine_agent.protocol.metrics import bucket_of, upper_edge_s

durations_s = st.floats(min_value=1e-4, max_value=800.0)


@given(st.lists(durations_s, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_to_five_percent(values: list[float], q: float) -> None:
    histogram = SlidingHistogram(window_s=30)
    for value in values:
        histogram.record(0.0, value)
    true = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert histogram.quantile(0.0, q) == pytest.approx(true, rel=0.05)


@given(durations_s)
def test_a_value_lies_below_the_edge_of_its_bucket_and_above_the_one_before(value: float) -> None:
    index = bucket_of(value)
    assert value <= upper_edge_s(index) * (1 + 1e-6)
    assert index == 0 or value > upper_edge_s(index - 1) * (1 - 1e-6)


def test_the_window_forgets_and_the_total_does_not() -> None:
    histogram = SlidingHistogram(window_s=30)
    histogram.record(100.0, 1.0)
    histogram.record(120.0, 0.01)
    assert histogram.quantile(120.0, 1.0) == pytest.approx(1.0, rel=0.05)
    assert histogram.quantile(130.0, 1.0) == pytest.approx(0.01, rel=0.05)
    assert histogram.quantile(150.0, 1.0) is None
    assert histogram.count == 2
    assert histogram.sum_s == pytest.approx(1.01)


def test_cumulative_counts_end_at_the_count_and_only_grow() -> None:
    histogram = SlidingHistogram(window_s=30)
    for value in (1e-5, 2e-4, 0.5, 0.5, 3.0):
        histogram.record(0.0, value)
    counts = [count for _, count in histogram.cumulative()]
    assert counts == sorted(counts)
    assert counts[-1] == histogram.count
    below = dict(histogram.cumulative())
    assert below[1e-4] == 1
    assert below[2e-4] == 2


def test_what_is_longer_than_the_last_edge_is_counted_all_the_same() -> None:
    histogram = SlidingHistogram(window_s=30)
    histogram.record(0.0, 10_000.0)
    assert histogram.cumulative()[-1][1] == 0
    assert histogram.count == 1
