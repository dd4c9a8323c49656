"""Exact shares: intervals that hold as often as they say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.planning.goodput import at_least_by_chance, at_most_by_chance, share_interval


def test_the_interval_is_the_published_one() -> None:
    """Rule of three, exactly: with no failure of n the upper bound is 1 - (0.025)^(1/n)."""
    low, high = share_interval(0, 10)
    assert (low, round(high, 6)) == (0.0, round(1 - 0.025**0.1, 6))
    assert [round(bound, 4) for bound in share_interval(198, 200)] == [0.9643, 0.9988]


def test_both_tails_meet_in_the_number_itself() -> None:
    both = at_most_by_chance(7, 20, 0.4) + at_least_by_chance(7, 20, 0.4)
    own = math.comb(20, 7) * 0.4**7 * 0.6**13
    assert both - 1 == pytest.approx(own)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 4)])
def test_no_share_has_no_interval(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        share_interval(successes, trials)


@given(st.integers(1, 400), st.data())
def test_the_share_that_was_seen_lies_within(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = share_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
