"""Marginal price of batches from known hours."""

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.usage.planning.figures import BatchHour, TimeParts, marginal_price, split_time


def day_and_night(batch_usd: float, days: int = 4, noise: float = 0.0, seed: int = 1) -> list[BatchHour]:
    """Real-time by day at 2 dollars per million tokens and 10 dollars per hour for cells that always run; batches by
    night."""
    chance, hours = random.Random(seed), []
    for hour in range(24 * days):
        is_night = hour % 24 < 8
        other, batch = chance.randrange(10**5, 4 * 10**6), chance.randrange(10**6, 9 * 10**6) if is_night else 0
        amount = 10 + 2 * other / 1e6 + batch_usd * batch / 1e6
        hours.append(BatchHour(amount * (1 + chance.uniform(-noise, noise)), other, batch))
    return hours


@pytest.mark.parametrize("usd", [0.25, 1.5, 4.0])
def test_a_known_price_is_found(usd: float) -> None:
    found = marginal_price(day_and_night(usd))
    assert found is not None
    assert float(found.value) == pytest.approx(usd, rel=1e-4)
    assert found.hours == 96


@pytest.mark.parametrize("seed", range(5))
def test_noise_widens_the_error_and_the_price_stays_within_it(seed: int) -> None:
    found = marginal_price(day_and_night(1.5, noise=0.1, seed=seed))
    assert found is not None
    assert found.error > 0
    assert abs(found.value - Decimal("1.5")) <= 4 * found.error


def test_what_runs_anyway_costs_batches_nothing() -> None:
    chance = random.Random(3)
    hours = [BatchHour(21.5, chance.randrange(10**6), chance.randrange(10**6) * (hour % 3 == 0)) for hour in range(72)]
    found = marginal_price(hours)
    assert found is not None
    assert found.value == 0


def test_too_few_hours_or_such_as_are_all_alike_tell_nothing() -> None:
    assert marginal_price(day_and_night(1.0, days=1)[:23]) is None
    assert marginal_price([BatchHour(10, 10**6, 0)] * 48) is None
    assert marginal_price([BatchHour(10, 10**6, 10**6)] * 48) is None
    assert marginal_price([BatchHour(0, 10**6, 10**6)] * 48) is None


def at(day: int, hour: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, tzinfo=UTC)


def days(*numbers: int) -> set[date]:
    return {date(2026, 11, number) for number in numbers}


def test_whole_days_are_read_from_sums_and_the_rest_by_hour() -> None:
    assert split_time(at(3, 5), at(9, 7), days(2, 3, 4, 5, 7, 9)) == TimeParts(
        days=((date(2026, 11, 4), date(2026, 11, 5)), (date(2026, 11, 7), date(2026, 11, 7))),
        hours=((at(3, 5), at(4)), (at(6), at(7)), (at(8), at(9, 7))),
    )


def test_a_day_whose_hours_expired_is_read_whole() -> None:
    assert split_time(at(3, 5), at(5, 7), days(4), days(2, 3)) == TimeParts(
        days=((date(2026, 11, 3), date(2026, 11, 4)),), hours=((at(5), at(5, 7)),)
    )
    assert split_time(at(3, 5), at(3, 7), (), days(3)) == TimeParts(((date(2026, 11, 3), date(2026, 11, 3)),), ())


@given(st.integers(0, 9 * 24), st.integers(1, 9 * 24), st.sets(st.integers(1, 20)))
def test_each_hour_is_read_once(start: int, length: int, summed: set[int]) -> None:
    begin = at(1) + timedelta(hours=start)
    parts = split_time(begin, begin + timedelta(hours=length), days(*summed))
    spans = [(datetime.combine(a, at(1).time(), UTC), datetime.combine(b, at(1).time(), UTC)) for a, b in parts.days]
    ordered = sorted([*parts.hours, *((a, b + timedelta(days=1)) for a, b in spans)])
    assert (ordered[0][0], ordered[-1][1]) == (begin, begin + timedelta(hours=length))
    assert all(one[1] == after[0] for one, after in pairwise(ordered))
