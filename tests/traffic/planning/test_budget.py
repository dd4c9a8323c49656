"""Where a budget stands, as a table; and that it stops nobody too early, and nobody for ever."""

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.budget import BudgetRules, BudgetStanding, MonthUse, month_of, plan_budget, used_percent

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOVEMBER, OCTOBER = date(2026, 11, 1), date(2026, 10, 1)
RULES = BudgetRules(tokens=1000, hard_stop=True)
MORE = BudgetRules(tokens=4000, hard_stop=True)
NOTHING = BudgetStanding(NOVEMBER)


@pytest.mark.parametrize(
    ("rules", "use", "was", "level", "stopped", "changes"),
    [
        (RULES, MonthUse(499), NOTHING, 0, False, ()),
        (RULES, MonthUse(500), NOTHING, 50, False, ("reached 50 % of its budget: 500 of 1,000 tokens",)),
        (RULES, MonthUse(999), BudgetStanding(NOVEMBER, 80), 80, False, ()),
        (RULES, MonthUse(1000), BudgetStanding(NOVEMBER, 80), 100, True, (
            "reached 100 % of its budget: 1,000 of 1,000 tokens", "its keys are refused: 1,000 of 1,000 tokens")),
        (RULES, MonthUse(1000), BudgetStanding(NOVEMBER, 100, stopped=True), 100, True, ()),
        (RULES, MonthUse(), BudgetStanding(OCTOBER, 100, stopped=True), 0, False, (
            "November 2026 began", "its keys are accepted again")),
        (RULES, MonthUse(), BudgetStanding(OCTOBER), 0, False, ()),
        (RULES, MonthUse(600), BudgetStanding(OCTOBER, 50), 50, False, (
            "November 2026 began", "reached 50 % of its budget: 600 of 1,000 tokens")),
        (MORE, MonthUse(1000), BudgetStanding(NOVEMBER, 100, stopped=True), 0, False, (
            "is below 100 % of its budget: 1,000 of 4,000 tokens", "its keys are accepted again")),
        (BudgetRules(tokens=1000), MonthUse(5000), NOTHING, 100, False, (
            "reached 100 % of its budget: 5,000 of 1,000 tokens",)),
        (BudgetRules(tokens=1000, thresholds=(200,), hard_stop=True), MonthUse(1000), NOTHING, 0, True, (
            "its keys are refused: 1,000 of 1,000 tokens",)),
        (BudgetRules(1000, Decimal(2)), MonthUse(10, Decimal("1.7")), NOTHING, 80, False, (
            "reached 80 % of its budget: 10 of 1,000 tokens, 1.70 of 2.00 USD",)),
    ],
)  # fmt: skip
def test_where_a_budget_stands(
    rules: BudgetRules, use: MonthUse, was: BudgetStanding, level: int, stopped: bool, changes: tuple[str, ...]
) -> None:
    plan = plan_budget(rules, use, was, NOW)
    assert plan.standing == BudgetStanding(NOVEMBER, level, stopped)
    assert plan.changes == changes


def test_months_are_those_of_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    assert month_of(datetime(2026, 12, 1, 8, 59, tzinfo=tokyo)) == NOVEMBER


LIMITS = st.one_of(st.none(), st.integers(1, 10**12))
MONEY = st.one_of(st.none(), st.decimals(min_value="0.000001", max_value=10**6, places=6))
THRESHOLDS = st.sets(st.integers(1, 1000), max_size=5).map(lambda each: tuple(sorted(each)))
RULED = st.builds(
    BudgetRules, LIMITS, MONEY, THRESHOLDS, st.booleans()
).filter(lambda rules: rules.tokens is not None or rules.money is not None)  # fmt: skip
USE = st.builds(MonthUse, st.integers(0, 10**13), st.decimals(min_value=0, max_value=10**7, places=12))
WAS = st.builds(BudgetStanding, st.sampled_from([NOVEMBER, OCTOBER]), st.integers(0, 1000), st.booleans())


@given(RULED, USE, WAS)
def test_a_stop_is_exactly_a_hard_budget_that_is_used_up_whatever_was_before(
    rules: BudgetRules, use: MonthUse, was: BudgetStanding
) -> None:
    plan = plan_budget(rules, use, was, NOW)
    is_used_up = (rules.tokens is not None and use.tokens >= rules.tokens) or (
        rules.money is not None and use.money >= rules.money
    )
    assert plan.standing.stopped == (rules.hard_stop and is_used_up)
    assert plan.standing.level <= used_percent(rules, use)
    again = plan_budget(rules, use, plan.standing, NOW)
    assert (again.standing, again.changes) == (plan.standing, ()), "said once"


@given(RULED, WAS)
def test_who_has_used_nothing_is_never_stopped(rules: BudgetRules, was: BudgetStanding) -> None:
    assert not plan_budget(rules, MonthUse(), was, NOW).standing.stopped
