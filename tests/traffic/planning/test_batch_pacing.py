"""Which batches fall behind their deadline, and what is done about them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.rows import NOW
from traffic.planning.batch_pacing import RESERVE, AtRiskPolicy, PacedBatch, PaceStep, plan_paces

DAY = timedelta(days=1)
TELL, NEAR, CELLS = AtRiskPolicy.TELL, AtRiskPolicy.NEAR_REALTIME, AtRiskPolicy.CELLS
BATCH = PacedBatch("b", NOW, NOW + DAY, remaining=36_000, rate=1.0)
"""A tenth of the day is reserve: from the middle of it on, 34,560 s are left."""


def at(hours: float, policy: AtRiskPolicy = TELL, *taken: str, **changes: object) -> list[str]:
    batch = replace(BATCH, policy=policy, taken=frozenset(map(PaceStep, taken)), **changes)  # type: ignore[arg-type]
    return [step.value for pace in plan_paces([batch], NOW + timedelta(hours=hours)) for step in pace.steps]


def test_what_keeps_its_planned_rate_is_left_alone() -> None:
    assert at(11) == []
    assert at(12) == ["tell"]
    assert at(12, remaining=34_560) == []
    assert at(12, remaining=34_561) == ["tell"]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(TELL, ["tell"]), (NEAR, ["raise", "tell"]), (CELLS, ["raise", "ask", "tell"])],
)
def test_one_step_after_the_other_each_once(policy: AtRiskPolicy, steps: list[str]) -> None:
    for number, step in enumerate(steps):
        assert at(12, policy, *steps[:number]) == [step]
    assert at(12, policy, *steps) == []


def test_a_policy_that_goes_further_later_takes_the_steps_that_are_left() -> None:
    assert at(12, CELLS, "tell") == ["raise"]
    assert at(12, CELLS, "tell", "raise") == ["ask"]


def test_a_key_that_may_not_send_as_near_real_time_skips_that() -> None:
    assert at(12, NEAR, may_raise=False) == ["tell"]
    assert at(12, CELLS, may_raise=False) == ["ask"]


def test_a_step_has_its_time_to_help() -> None:
    late: dict[str, Any] = {"since": NOW + timedelta(hours=12)}
    assert at(12.16, CELLS, "raise", **late) == []
    assert at(12.17, CELLS, "raise", **late) == ["ask"]
    assert at(12.17, CELLS, "raise", rate=2.0, **late) == []
    assert at(12.17, CELLS, "raise", rate=0.0, **late) == ["ask"], "it did not help at all"


def test_once_the_reserve_is_used_up_nothing_has_time_and_all_is_done() -> None:
    late: dict[str, Any] = {"since": NOW + timedelta(hours=21.59)}
    assert at(21.59, CELLS) == ["raise"]
    assert at(21.61, CELLS) == ["raise", "ask", "tell"]
    assert at(21.61, CELLS, "raise", **late) == ["ask", "tell"]
    assert at(24, CELLS) == []


def test_a_rate_counts_once_it_has_settled() -> None:
    assert at(0.1, rate=0.001) == []
    assert at(0.17, rate=0.001) == ["tell"]
    short: dict[str, Any] = {"expires_at": NOW + timedelta(minutes=10), "rate": 0.001}
    assert at(59 / 3600, **short) == []
    assert at(61 / 3600, **short) == ["tell"]


def test_an_unknown_rate_is_a_risk_once_the_reserve_is_used_up() -> None:
    assert at(21.5, rate=0.0) == []
    assert at(21.7, rate=0.0) == ["tell"]
    assert at(24, rate=0.0) == []


def test_the_reason_has_both_rates() -> None:
    (pace,) = plan_paces([replace(BATCH, done=7)], NOW + DAY / 2)
    assert pace.reason == "1.04 lines a second are needed and 1 are answered; 36000 lines are left"
    assert pace.done == 7


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
    batch = PacedBatch("b", NOW, ends_at, remaining, rate, policy)
    now = NOW + timedelta(seconds=window_s * share)
    paces = plan_paces([batch], now)
    assert len(paces) <= 1
    if not paces and rate and remaining and 0.1 < share < 1:
        assert now + timedelta(seconds=remaining / rate) <= ends_at - batch.reserve + timedelta(milliseconds=1)
    if paces and rate:
        assert now + timedelta(seconds=remaining / rate) > ends_at - timedelta(seconds=window_s * (RESERVE + 1e-9))
