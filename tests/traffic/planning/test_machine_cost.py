"""Tenants and idle time sum up to what cells cost, to the millionth of a dollar."""

from datetime import timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.rows import NOW
from traffic.planning.machine_cost import HOUR_MS, MICRO, MachineHour, parts_of_hours, shares, split_hour

PRICE = st.decimals(min_value=0, max_value=500, places=6)
MACHINES = st.builds(MachineHour, st.integers(0, 50 * HOUR_MS), st.integers(0, 60 * HOUR_MS), PRICE)


def test_the_busy_part_falls_to_accounts_by_their_tokens_and_the_rest_is_idle() -> None:
    split = split_hour([MachineHour(2 * HOUR_MS, HOUR_MS, Decimal(6))], {"rufus": 300, "ada": 100, "none": 0})
    assert (split.cost, split.idle) == (Decimal(12), Decimal(6))
    assert split.of_accounts == {"rufus": Decimal("4.5"), "ada": Decimal("1.5")}


def test_an_hour_without_tokens_is_idle() -> None:
    split = split_hour([MachineHour(HOUR_MS, HOUR_MS, Decimal(6))], {"rufus": 0})
    assert (split.cost, split.idle, split.of_accounts) == (Decimal(6), Decimal(6), {})


def test_what_cannot_be_shared_evenly_goes_to_the_largest_remainders() -> None:
    assert shares(Decimal("0.000010"), {"a": 1, "b": 1, "c": 1}) == {
        "a": Decimal("0.000004"), "b": Decimal("0.000003"), "c": Decimal("0.000003"),
    }  # fmt: skip
    assert shares(Decimal("0.000003"), {"a": 1, "b": 5}) == {"a": MICRO, "b": 2 * MICRO}


@given(st.lists(MACHINES, max_size=4), st.dictionaries(st.integers(0, 30), st.integers(0, 2**53), max_size=12))
def test_nothing_is_lost_and_nothing_is_invented(machines: list[MachineHour], tokens: dict[int, int]) -> None:
    split = split_hour(machines, tokens)
    assert sum(split.of_accounts.values(), Decimal(0)) + split.idle == split.cost
    assert split.idle >= 0
    assert all(amount >= 0 and amount % MICRO == 0 for amount in split.of_accounts.values())
    assert split.of_accounts.keys() <= {account for account, count in tokens.items() if count}


def test_time_is_cut_at_hours_and_a_long_absence_counts_a_day_at_most() -> None:
    since = NOW - timedelta(minutes=90)
    assert parts_of_hours(since, NOW) == [
        (NOW - timedelta(hours=2), 1_800_000),
        (NOW - timedelta(hours=1), 3_600_000),
    ]
    assert parts_of_hours(NOW, NOW) == []
    assert sum(ms for _, ms in parts_of_hours(NOW - timedelta(days=9), NOW)) == 24 * HOUR_MS
