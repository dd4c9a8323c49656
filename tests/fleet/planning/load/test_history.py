"""Totals that only grow become windows, whose percentiles are those of all samples in them."""

from engine_agent.protocol.messages import Load
from engine_agent.protocol.metrics import bucket_of, midpoint_s
from fleet.planning.load.counters import CellCounters
from fleet.planning.load.history import FINE_S, Accumulator, FinishedWindow, Sample, advance, pooled, sample_of

NOON_S = 1_795_262_400.0
"""A full hour."""


def load(requests: int, errors: int = 0, **more: object) -> Load:
    return Load(requests_total=requests, errors_total=errors, **more)  # type: ignore[arg-type]


def windows_of(*samples: Sample | None, series: Accumulator | None = None) -> list[FinishedWindow]:
    series = series or Accumulator()
    windows = []
    for number, sample in enumerate(samples, start=1):
        windows += advance(series, sample, NOON_S + number * FINE_S)
    return windows


def test_what_was_counted_before_the_first_sample_is_not_new() -> None:
    assert sample_of(load(1000), 1, None, None).requests == 0


def test_a_sample_is_what_was_added_since() -> None:
    added = sample_of(load(130, 4), 1, CellCounters(1, 100, 1), None)
    assert (added.requests, added.errors) == (30, 3)


def test_all_that_a_new_generation_counted_is_new() -> None:
    assert sample_of(load(7), 2, CellCounters(1, 100), None).requests == 7


def test_all_that_a_new_proxy_counted_is_new() -> None:
    assert sample_of(load(7), 1, CellCounters(1, 100), None).requests == 7


def test_first_tokens_beyond_the_objective_are_slow() -> None:
    counts = {bucket_of(0.1): 5, bucket_of(3.0): 2}
    added = sample_of(load(7, ttft_counts=counts), 1, CellCounters(1), 1000.0)
    assert added.slow == 2


def test_what_no_cell_can_have_counted_breaks_no_sum() -> None:
    mad = load(10**400, -5, in_flight=-1, tokens_per_s=float("inf"), ttft_counts={-3: 1, 9999: 1, 5: -2, 6: 1})
    added = sample_of(mad, 1, CellCounters(1), None)
    assert (added.requests, added.errors, added.in_flight, added.ttft) == (2**53, 0, 0.0, {6: 1})


def test_a_fine_window_is_the_one_that_is_over() -> None:
    (window,) = windows_of(Sample(requests=30))
    assert (window.step_s, window.at.timestamp(), window.covered_s) == (FINE_S, NOON_S, FINE_S)


def test_a_window_after_a_gap_says_how_much_time_it_covers() -> None:
    windows = windows_of(Sample(requests=1), None, None, Sample(requests=30))
    assert [window.covered_s for window in windows] == [FINE_S, 3 * FINE_S]


def test_five_minutes_hold_the_sum_of_their_samples() -> None:
    windows = windows_of(*[Sample(requests=10, errors=1, in_flight=4.0, cells=1.0)] * 21)
    (long,) = [window for window in windows if window.step_s == 300]
    assert (long.at.timestamp(), long.requests, long.errors, long.in_flight) == (NOON_S, 200, 20, 4.0)
    assert long.covered_s == 300


def test_a_long_window_ends_although_its_subject_is_gone() -> None:
    series = Accumulator()
    windows_of(Sample(requests=10), series=series)
    assert advance(series, None, NOON_S + 200) == []
    (long,) = advance(series, None, NOON_S + 310)
    assert (long.step_s, long.requests) == (300, 10)


def test_percentiles_of_many_cells_are_those_of_all_their_samples() -> None:
    fast, slow = bucket_of(0.1), bucket_of(5.0)
    (window,) = windows_of(pooled([Sample(ttft={fast: 99}), Sample(ttft={slow: 1})]))
    assert window.ttft_p50_ms == window.ttft_p95_ms == round(midpoint_s(fast) * 1000, 3)
