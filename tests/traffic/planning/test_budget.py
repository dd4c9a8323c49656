"""Where a budget stands, as a table; and that it stops a tenant exactly while the budget is used up."""

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.budget import BudgetRules, BudgetStanding, BudgetUnit, month_of, plan_budget, used_percent

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOVEMBER, OCTOBER = date(2026, 11, 1), date(2026, 10, 1)
TOKENS, USD = BudgetUnit.TOKENS, BudgetUnit.USD
RULES = BudgetRules(TOKENS, Decimal(1000), hard_stop=True)
MORE = BudgetRules(TOKENS, Decimal(4000), hard_stop=True)
NOTHING = BudgetStanding(NOVEMBER)


@pytest.mark.parametrize(
    ("rules", "used", "was", "level", "stopped", "changes"),
    [
        (RULES, "499", NOTHING, 0, False, ()),
        (RULES, "500", NOTHING, 50, False, ("reached 50 % of its budget: 500 of 1,000 tokens",)),
        (RULES, "999", BudgetStanding(NOVEMBER, 80), 80, False, ()),
        (RULES, "1000", BudgetStanding(NOVEMBER, 80), 100, True, (
            "reached 100 % of its budget: 1,000 of 1,000 tokens", "its keys are refused: 1,000 of 1,000 tokens")),
        (RULES, "1000", BudgetStanding(NOVEMBER, 100, stopped=True), 100, True, ()),
        (RULES, "0", BudgetStanding(OCTOBER, 100, stopped=True), 0, False, (
            "November 2026 began", "its keys are accepted again")),
        (RULES, "0", BudgetStanding(OCTOBER), 0, False, ()),
        (RULES, "600", BudgetStanding(OCTOBER, 50), 50, False, (
            "November 2026 began", "reached 50 % of its budget: 600 of 1,000 tokens")),
        (MORE, "1000", BudgetStanding(NOVEMBER, 100, stopped=True), 0, False, (
            "is below 100 % of its budget: 1,000 of 4,000 tokens", "its keys are accepted again")),
        (BudgetRules(TOKENS, Decimal(1000)), "5000", NOTHING, 100, False, (
            "reached 100 % of its budget: 5,000 of 1,000 tokens",)),
        (BudgetRules(TOKENS, Decimal(1000), alert_at=(200,), hard_stop=True), "1000", NOTHING, 0, True, (
            "its keys are refused: 1,000 of 1,000 tokens",)),
        (BudgetRules(USD, Decimal(2)), "1.7", NOTHING, 80, False, (
            "reached 80 % of its budget: 1.70 of 2.00 USD",)),
    ],
)  # fmt: skip
def test_where_a_budget_stands(
    rules: BudgetRules, used: str, was: BudgetStanding, level: int, stopped: bool, changes: tuple[str, ...]
) -> None:
    plan = plan_budget(rules, Decimal(used), was, NOW)
    assert plan.standing == BudgetStanding(NOVEMBER, level, stopped)
    assert plan.changes == changes


def test_months_are_those_of_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    assert month_of(datetime(2026, 12, 1, 8, 59, tzinfo=tokyo)) == NOVEMBER


TOKEN_LIMITS = st.integers(1, 10**12).map(Decimal)
MONEY = st.decimals(min_value="0.000001", max_value=10**6, places=6)
ALERTS = st.sets(st.integers(1, 1000), max_size=5).map(lambda each: tuple(sorted(each)))
RULED = st.one_of(
    st.builds(BudgetRules, st.just(TOKENS), TOKEN_LIMITS, ALERTS, st.booleans()),
    st.builds(BudgetRules, st.just(USD), MONEY, ALERTS, st.booleans()),
)
USED = st.one_of(st.integers(0, 10**13).map(Decimal), st.decimals(min_value=0, max_value=10**7, places=12))
WAS = st.builds(BudgetStanding, st.sampled_from([NOVEMBER, OCTOBER]), st.integers(0, 1000), st.booleans())


@given(RULED, USED, WAS)
def test_a_stop_is_exactly_a_hard_budget_that_is_used_up_whatever_was_before(
    rules: BudgetRules, used: Decimal, was: BudgetStanding
) -> None:
    plan = plan_budget(rules, used, was, NOW)
    assert plan.standing.stopped == (rules.hard_stop and used >= rules.limit)
    assert plan.standing.level <= used_percent(rules, used)
    again = plan_budget(rules, used, plan.standing, NOW)
    assert (again.standing, again.changes) == (plan.standing, ()), "announced once"


@given(RULED, WAS)
def test_a_tenant_without_usage_is_never_stopped(rules: BudgetRules, was: BudgetStanding) -> None:
    assert not plan_budget(rules, Decimal(0), was, NOW).standing.stopped
