"""Tenants and idle time sum up to what cells cost and drew, to the last unit."""

from datetime import timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.rows import NOW
from traffic.planning.machine_cost import (
    DEFAULT_WEIGHTS,
    HOUR_MS,
    TokenWeights,
    cost_of,
    parts_of_amount,
    parts_of_hours,
    shares,
    split_hour,
    weights_of,
)
from traffic.planning.price import TokenPrice

AMOUNT = st.integers(0, 10**18)
WEIGHTS = st.dictionaries(st.integers(0, 30), st.integers(0, 2**70), max_size=12)
LOOKS = st.lists(st.tuples(st.integers(0, 500_000_000), st.integers(0, 20_000), st.booleans()), max_size=40)
"""What machines cost an hour in millionths of a dollar, for how many milliseconds, and whether they were busy."""


def test_the_busy_part_falls_to_accounts_by_what_their_tokens_weigh_and_the_rest_is_idle() -> None:
    split = split_hour(12_000_000, 6_000_000, {"rufus": 300, "ada": 100, "none": 0})
    assert (split.whole, split.idle) == (12_000_000, 6_000_000)
    assert split.of_accounts == {"rufus": 4_500_000, "ada": 1_500_000}


def test_an_hour_without_tokens_is_idle() -> None:
    split = split_hour(6, 6, {"rufus": 0})
    assert (split.whole, split.idle, split.of_accounts) == (6, 6, {})


def test_what_cannot_be_shared_evenly_goes_to_the_largest_remainders() -> None:
    assert shares(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert shares(3, {"a": 1, "b": 5}) == {"a": 1, "b": 2}
    assert shares(7, {"a": 3, "b": 2, "c": 2}) == {"a": 3, "b": 2, "c": 2}


@given(AMOUNT, AMOUNT, WEIGHTS)
def test_nothing_is_lost_and_nothing_is_invented(whole: int, busy: int, weights: dict[int, int]) -> None:
    split = split_hour(whole, busy, weights)
    assert sum(split.of_accounts.values()) + split.idle == split.whole == whole
    assert split.idle >= 0
    assert all(amount >= 0 for amount in split.of_accounts.values())
    assert split.of_accounts.keys() <= {account for account, weight in weights.items() if weight}


@given(AMOUNT, st.dictionaries(st.integers(0, 30), st.integers(1, 2**70), min_size=1, max_size=12))
def test_nobody_gets_a_unit_more_than_the_next_whole_one_of_his_share(amount: int, weights: dict[int, int]) -> None:
    total = sum(weights.values())
    for account, got in shares(amount, weights).items():
        assert amount * weights[account] // total <= got <= -(-amount * weights[account] // total)


@given(LOOKS, WEIGHTS)
def test_machines_that_come_go_and_change_their_price_within_an_hour_cost_what_their_milliseconds_do(
    looks: list[tuple[int, int, bool]], weights: dict[int, int]
) -> None:
    spent = sum(price * ms for price, ms, _ in looks)
    busy = sum(price * ms for price, ms, is_busy in looks if is_busy)
    exact = sum((Decimal(price) * ms / HOUR_MS for price, ms, _ in looks), Decimal(0))
    split = split_hour(cost_of(spent), cost_of(busy), weights)
    assert abs(split.whole - exact) <= Decimal("0.5") + Decimal("1e-9")
    assert sum(split.of_accounts.values()) + split.idle == split.whole


@given(st.integers(0, 2**60), st.integers(0, 90_000_000), st.integers(0, 7_200_000))
def test_an_amount_of_several_hours_is_cut_without_a_rest(amount: int, before_ms: int, after_ms: int) -> None:
    since, now = NOW - timedelta(milliseconds=before_ms), NOW + timedelta(milliseconds=after_ms)
    cut = parts_of_amount(amount, parts_of_hours(since, now))
    assert sum(cut.values()) == (amount if since < now else 0)


def test_tokens_weigh_what_their_prices_say_and_else_what_is_usual() -> None:
    price = TokenPrice(Decimal("0.6"), Decimal("0.06"), Decimal("1.8"))
    assert weights_of(price) == TokenWeights(600_000, 60_000, 1_800_000)
    assert weights_of(None) == weights_of(TokenPrice(*[Decimal(0)] * 3)) == DEFAULT_WEIGHTS
    assert TokenWeights(10, 1, 40).of(100, 60, 2) == 40 * 10 + 60 + 2 * 40
    assert TokenWeights(10, 1, 40).of(100, 600, 0) == 100


def test_time_is_cut_at_hours_and_a_long_absence_counts_a_day_at_most() -> None:
    since = NOW - timedelta(minutes=90)
    assert parts_of_hours(since, NOW) == [
        (NOW - timedelta(hours=2), 1_800_000),
        (NOW - timedelta(hours=1), 3_600_000),
    ]
    assert parts_of_hours(NOW, NOW) == []
    assert sum(ms for _, ms in parts_of_hours(NOW - timedelta(days=9), NOW)) == 24 * HOUR_MS
