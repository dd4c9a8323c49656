"""A budget for a month: which of its alerts it has reached, and whether its tenant's keys are to be refused. Pure.

The plan is about the state, not about changes: whatever was missed, the next pass comes to the same result. A new month
(UTC) begins at nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum

DEFAULT_ALERT_AT = (50, 80, 100)
MOST_ALERTS = 10
MOST_PERCENT = 1000
FULL = 100
"""Per cent of a budget at which a hard stop begins, whatever its alerts are."""


class BudgetUnit(StrEnum):
    """Prompt and completion tokens, or US dollars."""

    TOKENS = "tokens"
    USD = "usd"


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """What an admin laid down. `alert_at`: rising per cents of `limit`."""

    unit: BudgetUnit
    limit: Decimal
    alert_at: tuple[int, ...] = DEFAULT_ALERT_AT
    hard_stop: bool = False


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """What was last announced: for which month, the alert in per cent (0: none), and whether keys are refused."""

    month: date
    level: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Where a budget stands now. `changes`: what differs from what was announced, as sentences."""

    standing: BudgetStanding
    used_percent: Decimal
    changes: tuple[str, ...] = field(default=())


def month_of(now: datetime) -> date:
    """The first day of the month that counts."""
    return now.astimezone(UTC).date().replace(day=1)


def check_limit(unit: BudgetUnit, limit: Decimal) -> None:
    """Raises ValueError if no budget can have this limit."""
    if limit <= 0:
        raise ValueError("a budget is more than 0; to serve a tenant nothing, revoke its keys")
    if unit is BudgetUnit.TOKENS and limit != limit.to_integral_value():
        raise ValueError("a budget of tokens is a whole number")


def check_alert_at(alert_at: Sequence[int]) -> None:
    """Raises ValueError if this is no list of alerts."""
    if len(alert_at) > MOST_ALERTS:
        raise ValueError(f"at most {MOST_ALERTS} alerts, not {len(alert_at)}")
    if any(not 0 < each <= MOST_PERCENT for each in alert_at):
        raise ValueError(f"alerts are whole per cents from 1 to {MOST_PERCENT}")
    if list(alert_at) != sorted(set(alert_at)):
        raise ValueError("alerts rise, each once")


def used_percent(rules: BudgetRules, used: Decimal) -> Decimal:
    return used * 100 / rules.limit


def plan_budget(rules: BudgetRules, used: Decimal, was: BudgetStanding, now: datetime) -> BudgetPlan:
    """Where a budget stands. `used`: in the month of `now`."""
    month, percent = month_of(now), used_percent(rules, used)
    level = max((each for each in rules.alert_at if percent >= each), default=0)
    standing = BudgetStanding(month, level, stopped=rules.hard_stop and percent >= FULL)
    return BudgetPlan(standing, percent, tuple(_changes(rules, used, was, standing)))


def describe_limit(rules: BudgetRules) -> str:
    """ "2,000,000 tokens", "10.00 USD"."""
    return f"{rules.limit:,.0f} tokens" if rules.unit is BudgetUnit.TOKENS else f"{rules.limit:,.2f} USD"


def describe_use(rules: BudgetRules, used: Decimal) -> str:
    """ "1,200,000 of 2,000,000 tokens", "3.50 of 10.00 USD"."""
    places = 0 if rules.unit is BudgetUnit.TOKENS else 2
    return f"{used:,.{places}f} of {describe_limit(rules)}"


def _changes(rules: BudgetRules, used: Decimal, was: BudgetStanding, now: BudgetStanding) -> list[str]:
    use, is_new = describe_use(rules, used), was.month != now.month
    changes = [f"{now.month:%B %Y} began"] if is_new and (was.level or was.stopped) else []
    before = 0 if is_new else was.level
    if now.level > before:
        changes.append(f"reached {now.level} % of its budget: {use}")
    elif now.level < before:
        changes.append(f"is below {before} % of its budget: {use}")
    if now.stopped and not was.stopped:
        changes.append(f"its keys are refused: {use}")
    elif was.stopped and not now.stopped:
        changes.append("its keys are accepted again")
    return changes
