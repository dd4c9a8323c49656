"""Counters become windows with percentiles of all samples, and the two tests of chance agree with counting every
split."""

from collections import Counter
from itertools import combinations
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.load_messages import CacheLoad, CellWork, EngineLoad, Load
from engine_agent.protocol.metrics import bucket_of, midpoint_s
from fleet.load.planner import (
    FINE_S,
    Accumulator,
    CellCounters,
    FinishedWindow,
    Sample,
    advance,
    count_above,
    greater_by_chance,
    more_by_chance,
    pooled_samples,
    quantile_bucket,
    refused_sample,
    sample_of,
    seen_by_clients,
)

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


@pytest.mark.parametrize(
    ("counted", "seen"),
    [
        pytest.param(Sample(1, 1, passed_on=1), (1, 0), id="it began here, its engine died, it continued elsewhere"),
        pytest.param(Sample(1, 0, continued=1), (0, 0), id="it began elsewhere and continued here"),
        pytest.param(Sample(1, 1, passed_on=1, continued=1), (0, 0), id="it continued here, and broke again"),
        pytest.param(Sample(0, 8, passed_on=8), (0, 0), id="long streams of earlier samples lost their engine"),
        pytest.param(Sample(1, 1, handed_back=1), (0, 0), id="it was refused here and answered elsewhere"),
        pytest.param(Sample(1, 1), (1, 1), id="it broke without a relay"),
    ],
)
def test_a_request_counts_once_as_its_client_saw_it(counted: Sample, seen: tuple[int, int]) -> None:
    client = seen_by_clients(counted)
    assert (client.requests, client.errors) == seen


def test_a_cut_stream_fails_a_request_that_a_cell_has_counted() -> None:
    together = pooled_samples([seen_by_clients(Sample(1, 1, passed_on=1)), refused_sample(0, cut=1)])
    assert (together.requests, together.errors) == (1, 1)


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


def test_ratios_of_a_window_are_those_of_all_its_samples_and_cells() -> None:
    before = CellCounters(1, steps=100, busy_ms=900, prompt_tokens=1000, cached_tokens=400, preemptions=9)
    busy = load(
        0,
        prompt_tokens_total=1300,
        cache=CacheLoad(found_tokens_total=450, other_found_tokens_total=100),
        work=CellWork(0.0, busy_ms=1900, steps=150),
        engine=EngineLoad(running=12, waiting=3, kv_percent=80.0, preemptions_total=2),
    )
    here = sample_of(busy, 1, before, None)
    there = sample_of(load(0, engine=EngineLoad(kv_percent=20.0)), 1, CellCounters(1), None)
    (window,) = windows_of(pooled_samples([here, there, sample_of(load(0), 1, CellCounters(1), None)]))
    assert (window.prompt_tokens, window.preemptions) == (300, 2), "a restarted engine counts completely"
    assert (window.cache_hit_percent, window.step_ms) == (50.0, 20.0)
    assert (window.running, window.waiting, window.kv_percent) == (12.0, 3.0, 50.0)


def test_a_figure_that_no_engine_reports_is_unknown_and_not_zero() -> None:
    (window,) = windows_of(sample_of(load(5), 1, CellCounters(1), None))
    unknown = (window.running, window.waiting, window.kv_percent, window.cache_hit_percent, window.step_ms)
    assert unknown == (None,) * 5


def test_percentiles_of_many_cells_are_those_of_all_their_samples() -> None:
    fast, slow = bucket_of(0.1), bucket_of(5.0)
    (window,) = windows_of(pooled_samples([Sample(ttft={fast: 99}), Sample(ttft={slow: 1})]))
    assert window.ttft_p50_ms == window.ttft_p95_ms == round(midpoint_s(fast) * 1000, 3)


samples = st.lists(st.integers(0, 5), min_size=4, max_size=6)


def u_of(one: list[int], other: list[int]) -> float:
    return sum((x > y) + (x == y) / 2 for x in one for y in other)


def by_counting(one: list[int], other: list[int]) -> float:
    """The same normal approximation, with mean and variance of U from all splits of the samples."""
    everything = one + other
    all_u = []
    for chosen in combinations(range(len(everything)), len(one)):
        here = [everything[i] for i in chosen]
        there = [everything[i] for i in range(len(everything)) if i not in chosen]
        all_u.append(u_of(here, there))
    spread = pstdev(all_u)
    return 1.0 if spread == 0 else 1 - NormalDist().cdf((u_of(one, other) - fmean(all_u) - 0.5) / spread)


@given(one=samples, other=samples)
def test_ties_are_corrected_for_as_counting_all_splits_would(one: list[int], other: list[int]) -> None:
    assert greater_by_chance(Counter(one), Counter(other)) == pytest.approx(by_counting(one, other), abs=1e-9)


def test_higher_samples_are_hardly_chance_and_alike_or_missing_ones_are() -> None:
    low, high = {10: 50, 11: 50}, {12: 50, 13: 50}
    assert greater_by_chance(high, low) < 1e-9
    assert greater_by_chance(low, high) > 0.99
    assert greater_by_chance({10: 50}, {10: 70}) == 1.0
    assert greater_by_chance({}, low) == 1.0


@given(hits=st.integers(0, 4), other_hits=st.integers(0, 4))
def test_the_exact_test_of_shares_counts_every_split(hits: int, other_hits: int) -> None:
    tries, other_tries = 4, 5
    other_hits = min(other_hits, other_tries)
    marked = set(range(hits + other_hits))
    splits = list(combinations(range(tries + other_tries), tries))
    as_many = sum(len(marked & set(split)) >= hits for split in splits)
    expected = as_many / len(splits) if marked else 1.0
    assert more_by_chance(hits, tries, other_hits, other_tries) == pytest.approx(expected)


@pytest.mark.parametrize(("q", "bucket"), [(0.0, 3), (0.5, 3), (0.51, 4), (0.95, 9), (1.0, 9)])
def test_a_quantile_lies_in_a_bucket(q: float, bucket: int) -> None:
    assert quantile_bucket({3: 50, 4: 40, 9: 10}, q) == bucket


def test_no_samples_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        quantile_bucket({}, 0.5)
    assert count_above({3: 5, 4: 2}, 3) == 2
