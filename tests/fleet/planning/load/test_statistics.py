"""The two tests of chance, against counting every split by hand."""

from collections import Counter
from itertools import combinations
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.load.statistics import count_above, greater_by_chance, more_by_chance, quantile_bucket

samples = st.lists(st.integers(0, 5), min_size=4, max_size=6)


def u_of(one: list[int], other: list[int]) -> float:
    return sum((x > y) + (x == y) / 2 for x in one for y in other)


def by_counting(one: list[int], other: list[int]) -> float:
    """The same normal approximation, with mean and variance of U taken from all splits of the samples."""
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
