"""Which differences between token counts open incidents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.drift import DRIFT_ALLOWED, TOKENS_ALLOWED, CheckedCell, DriftPlan, plan_token_drift

counts = st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))


def cell(engine: tuple[int, int], counted: tuple[int, int], name: str = "c1") -> CheckedCell:
    return CheckedCell(name, 1.0, engine, counted)


@pytest.mark.parametrize(
    ("engine", "counted", "is_drift"),
    [
        ((1000, 1000), (1000, 1000), False),
        ((1000, 1000), (1000, 1000 - TOKENS_ALLOWED), False),
        ((1000, 1000), (1000, 999 - TOKENS_ALLOWED), True),
        ((10**6, 10**6), (10**6, 10**6 - 2000), False),
        ((10**6, 10**6), (10**6, 10**6 - 2001), True),
        ((10**6, 10**6), (10**6 + 1001, 10**6 - 1001), True),
        ((0, 0), (0, TOKENS_ALLOWED + 1), True),
    ],
)
def test_what_is_above_both_limits_is_drift(engine: tuple[int, int], counted: tuple[int, int], is_drift: bool) -> None:
    assert cell(engine, counted).has_drift is is_drift


def test_an_incident_is_opened_once_and_says_both_counts() -> None:
    bad = cell((5000, 1000), (3000, 1000))
    ((found, sentence),) = plan_token_drift([bad], {"c1"}, set()).opened
    assert found is bad
    assert sentence == ("c1 counted 3000 prompt and 1000 completion tokens, its engine 5000 and 1000: 33.33 % apart")
    assert plan_token_drift([bad], {"c1"}, {"c1"}) == DriftPlan()


def test_it_is_closed_when_the_counts_agree_or_the_cell_is_gone_and_not_while_it_is_silent() -> None:
    good = cell((5000, 1000), (5000, 1000))
    assert plan_token_drift([good], {"c1"}, {"c1"}).closed == (("c1", "cell and engine agree again"),)
    assert plan_token_drift([], set(), {"c1"}).closed == (("c1", "the cell was stopped"),)
    assert plan_token_drift([], {"c1"}, {"c1"}) == DriftPlan()


@given(counts, counts, st.booleans())
def test_nothing_within_the_limits_ever_opens_one(
    engine: tuple[int, int], counted: tuple[int, int], is_open: bool
) -> None:
    plan = plan_token_drift([cell(engine, counted)], {"c1"}, {"c1"} if is_open else set())
    apart = abs(engine[0] - counted[0]) + abs(engine[1] - counted[1])
    is_within = apart <= TOKENS_ALLOWED or apart <= DRIFT_ALLOWED * sum(engine)
    assert bool(plan.opened) is (not is_within and not is_open)
    assert bool(plan.closed) is (is_within and is_open)
