"""A tenant's budget for a month: which threshold it has reached, and whether its keys are to be refused. Pure.

The plan is about the state, not about changes: whatever was missed, the next look comes to the same result. A new month
(UTC) begins at nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal

DEFAULT_THRESHOLDS = (50, 80, 100)
MOST_THRESHOLDS = 10
MOST_PERCENT = 1000
FULL = 100
"""Per cent of a budget at which a hard stop begins, whatever its thresholds are."""


@dataclass(frozen=True, slots=True)
class MonthUse:
    """What a tenant has used of a month: prompt and completion tokens, and their price in US dollars."""

    tokens: int = 0
    money: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """What an admin laid down. None: no limit of that kind; at least one is there."""

    tokens: int | None = None
    money: Decimal | None = None
    thresholds: tuple[int, ...] = DEFAULT_THRESHOLDS
    hard_stop: bool = False


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """What was last announced: for which month, the threshold in per cent (0: none), and whether keys are refused."""

    month: date
    level: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What is so now; `changes` says so in sentences, none if all is as it was announced."""

    standing: BudgetStanding
    used_percent: Decimal
    changes: tuple[str, ...] = field(default=())


def month_of(now: datetime) -> date:
    """The first day of the month that counts."""
    return now.astimezone(UTC).date().replace(day=1)


def check_rules(rules: BudgetRules) -> None:
    """Raises ValueError: what no budget can be."""
    if rules.tokens is None and rules.money is None:
        raise ValueError("a budget limits tokens, money or both: state `tokens_per_month` or `money_per_month`")
    if any(limit is not None and limit <= 0 for limit in (rules.tokens, rules.money)):
        raise ValueError("a budget is more than 0")
    check_thresholds(rules.thresholds)


def check_thresholds(thresholds: Sequence[int]) -> None:
    """Raises ValueError: what no list of thresholds can be."""
    if len(thresholds) > MOST_THRESHOLDS:
        raise ValueError(f"at most {MOST_THRESHOLDS} thresholds, not {len(thresholds)}")
    if any(not 0 < each <= MOST_PERCENT for each in thresholds):
        raise ValueError(f"thresholds are whole per cents from 1 to {MOST_PERCENT}")
    if list(thresholds) != sorted(set(thresholds)):
        raise ValueError("thresholds rise, each once")


def used_percent(rules: BudgetRules, use: MonthUse) -> Decimal:
    """How much of the limit that is nearer is used."""
    parts = []
    if rules.tokens:
        parts.append(Decimal(use.tokens) * 100 / rules.tokens)
    if rules.money:
        parts.append(use.money * 100 / rules.money)
    return max(parts, default=Decimal(0))


def plan_budget(rules: BudgetRules, use: MonthUse, was: BudgetStanding, now: datetime) -> BudgetPlan:
    """Where a budget stands. `use` is that of the month of `now`."""
    month, percent = month_of(now), used_percent(rules, use)
    level = max((each for each in rules.thresholds if percent >= each), default=0)
    standing = BudgetStanding(month, level, stopped=rules.hard_stop and percent >= FULL)
    return BudgetPlan(standing, percent, tuple(_changes(rules, use, was, standing)))


def describe_use(rules: BudgetRules, use: MonthUse) -> str:
    """ "1,200,000 of 2,000,000 tokens, 3.50 of 10.00 USD": of what is limited."""
    parts = [f"{use.tokens:,} of {rules.tokens:,} tokens"] if rules.tokens else []
    parts += [f"{use.money:,.2f} of {rules.money:,.2f} USD"] if rules.money else []
    return ", ".join(parts)


def _changes(rules: BudgetRules, use: MonthUse, was: BudgetStanding, now: BudgetStanding) -> list[str]:
    used, is_new = describe_use(rules, use), was.month != now.month
    changes = [f"{now.month:%B %Y} began"] if is_new and (was.level or was.stopped) else []
    before = 0 if is_new else was.level
    if now.level > before:
        changes.append(f"reached {now.level} % of its budget: {used}")
    elif now.level < before:
        changes.append(f"is below {before} % of its budget: {used}")
    if now.stopped and not was.stopped:
        changes.append(f"its keys are refused: {used}")
    elif was.stopped and not now.stopped:
        changes.append("its keys are accepted again")
    return changes
