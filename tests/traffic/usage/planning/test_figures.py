"""Marginal price of batches from known hours."""

import random
from decimal import Decimal

import pytest

from traffic.usage.planning.figures import BatchHour, marginal_price


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
