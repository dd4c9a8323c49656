"""Which batches fall behind their deadline, and what is done about them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.rows import NOW
from traffic.planning.batch_pacing import RESERVE, AtRiskPolicy, PacedBatch, plan_paces

DAY = timedelta(days=1)
TELL, RAISE = AtRiskPolicy.TELL, AtRiskPolicy.NEAR_REALTIME
BATCH = PacedBatch("b", NOW, NOW + DAY, remaining=36_000, rate=1.0)
"""A tenth of the day is reserve: from the middle of it on, 34,560 s are left."""


def at(hours: float, policy: AtRiskPolicy = TELL, **changes: object) -> list[bool]:
    """For each pace whether it raises the class."""
    batch = replace(BATCH, **changes)  # type: ignore[arg-type]
    return [pace.raises for pace in plan_paces([batch], policy, NOW + timedelta(hours=hours))]


def test_what_keeps_its_planned_rate_is_left_alone() -> None:
    assert at(11) == []
    assert at(12) == [False]
    assert at(12, remaining=34_560) == []
    assert at(12, remaining=34_561) == [False]


def test_the_owner_is_told_once_and_the_class_is_raised_once() -> None:
    assert at(12, RAISE) == [True]
    assert at(12, TELL, is_at_risk=True) == []
    assert at(12, RAISE, is_at_risk=True) == [True]
    assert at(12, RAISE, is_at_risk=True, is_raised=True) == []
    assert at(12, RAISE, may_raise=False) == [False]


def test_a_rate_counts_once_it_has_settled() -> None:
    assert at(0.1, rate=0.001) == []
    assert at(0.17, rate=0.001) == [False]
    short: dict[str, Any] = {"expires_at": NOW + timedelta(minutes=10), "rate": 0.001}
    assert at(59 / 3600, **short) == []
    assert at(61 / 3600, **short) == [False]


def test_an_unknown_rate_is_a_risk_once_the_reserve_is_used_up() -> None:
    assert at(21.5, rate=0.0) == []
    assert at(21.7, rate=0.0) == [False]
    assert at(24, rate=0.0) == []


def test_the_reason_has_both_rates() -> None:
    (pace,) = plan_paces([BATCH], TELL, NOW + DAY / 2)
    assert pace.reason == "1.04 lines a second are needed and 1 are answered; 36000 lines are left"


@pytest.mark.parametrize("remaining", [0])
def test_what_has_no_line_left_is_no_risk(remaining: int) -> None:
    assert at(23.9, remaining=remaining) == []


@given(
    st.integers(0, 10**6),
    st.just(0.0) | st.floats(1e-3, 10**4),
    st.floats(600, 7 * 86_400),
    st.floats(0, 1.2),
    st.sampled_from(AtRiskPolicy),
)
def test_who_is_not_at_risk_ends_with_the_reserve_left(
    remaining: int, rate: float, window_s: float, share: float, policy: AtRiskPolicy
) -> None:
    ends_at = NOW + timedelta(seconds=window_s)
    batch = PacedBatch("b", NOW, ends_at, remaining, rate)
    now = NOW + timedelta(seconds=window_s * share)
    paces = plan_paces([batch], policy, now)
    assert len(paces) <= 1
    if not paces and rate and remaining and 0.1 < share < 1:
        assert now + timedelta(seconds=remaining / rate) <= ends_at - batch.reserve + timedelta(milliseconds=1)
    if paces and rate:
        assert now + timedelta(seconds=remaining / rate) > ends_at - timedelta(seconds=window_s * (RESERVE + 1e-9))
