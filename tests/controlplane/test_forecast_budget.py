"""Forecasts take turns, end in time, and take no more of a minute than there is for them."""

import pytest

from controlplane.forecast_budget import ForecastBudget, ForecastLimits
from kernel.refusals import Busy, ShareUsedUp

LIMITS = ForecastLimits(of_one_s=5, of_user_s=8, of_all_s=12, window_s=60, patience_s=0)


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.core_s = 0.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def budget(time: Time) -> ForecastBudget:
    return ForecastBudget(LIMITS, monotonic=lambda: time.now_s, core_s=lambda: time.core_s)


def forecast(budget: ForecastBudget, time: Time, user: str, wants_s: float) -> float:
    with budget.take(user) as has_time:
        began_s = time.core_s
        while has_time() and time.core_s - began_s < wants_s:
            time.core_s += 1
        return time.core_s - began_s


def test_a_forecast_ends_at_its_bound(budget: ForecastBudget, time: Time) -> None:
    assert forecast(budget, time, "ada", 2) == 2
    assert forecast(budget, time, "ada", 600) == 5


def test_a_forecast_ends_though_it_gets_little_of_a_core(budget: ForecastBudget, time: Time) -> None:
    with budget.take("ada") as has_time:
        time.now_s += LIMITS.waited_s
        assert not has_time()


def test_a_user_has_a_share_of_each_minute(budget: ForecastBudget, time: Time) -> None:
    assert [forecast(budget, time, "ada", 600) for _ in range(2)] == [5, 3]
    time.now_s += 20
    with pytest.raises(ShareUsedUp, match="you had") as busy:
        forecast(budget, time, "ada", 1)
    assert busy.value.retry_after_s == 40
    assert forecast(budget, time, "grace", 1) == 1
    time.now_s += 40
    assert forecast(budget, time, "ada", 1) == 1


def test_all_users_together_have_one_too(budget: ForecastBudget, time: Time) -> None:
    assert [forecast(budget, time, user, 600) for user in ("ada", "grace", "oscar")] == [5, 5, 2]
    with pytest.raises(Busy, match="all users together"):
        forecast(budget, time, "eve", 1)


def test_one_is_made_at_a_time(budget: ForecastBudget) -> None:
    with budget.take("ada"), pytest.raises(Busy, match="another forecast"), budget.take("grace"):
        pass
    with budget.take("grace"):
        pass
