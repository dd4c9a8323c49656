"""Reads budgets with their use in this month. It never writes. Budgets can refuse keys, so their use is read from hours
and months, and not from sums of days."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property

from django.db.models import F, Q, Sum

from traffic.keys.models import ApplicationKey
from traffic.usage.models import Budget, CellHour, UsageHour, UsageMonth
from traffic.usage.planning.counting import BudgetUnit, describe_use, month_of, used_percent
from traffic.usage.planning.prices import HOUR_MS


def month_costs(month: date, end: datetime) -> dict[str, Decimal]:
    """Returns the machine cost of each deployment in US dollars since the start of a month (UTC), including the current
    hour; the empty deployment is all machines, including spares."""
    hours = CellHour.objects.filter(hour__gte=datetime.combine(month, time.min, UTC), hour__lt=end).order_by()
    spent = {
        row["deployment"]: Decimal(row["total"]) / HOUR_MS / 1_000_000
        for row in hours.values("deployment").annotate(total=Sum("spent"))
    }
    return {**spent, "": sum(spent.values(), Decimal(0))}


class MonthUse:
    """Usage in the month of `now`. Each table is read once, when a budget needs it."""

    def __init__(self, now: datetime) -> None:
        self.month = month_of(now)
        self._now = now

    def of(self, budget: Budget) -> Decimal:
        if budget.is_of_machines:
            return self._machines.get(budget.deployment, Decimal(0))
        used = self._keys.get(budget.key) if budget.key else self._tenants.get(budget.tenant)
        tokens, charged = used or (Decimal(0), Decimal(0))
        return tokens if budget.unit == BudgetUnit.TOKENS else charged

    @cached_property
    def _machines(self) -> dict[str, Decimal]:
        return month_costs(self.month, self._now)

    @cached_property
    def _tenants(self) -> dict[str, tuple[Decimal, Decimal]]:
        tenants = Budget.objects.exclude(tenant="").values("tenant")
        months = UsageMonth.objects.filter(month=self.month, tenant__in=tenants)
        return {row.tenant: (Decimal(row.tokens), row.charged) for row in months}

    @cached_property
    def _keys(self) -> dict[str, tuple[Decimal, Decimal]]:
        """Of keys with a budget, by the first key of their rotations. Hours are kept for longer than a month."""
        began = datetime(self.month.year, self.month.month, 1, tzinfo=UTC)
        limited = Budget.objects.exclude(key="").values("key")
        replaced = ApplicationKey.objects.filter(first_prefix__in=limited)
        first = dict(replaced.values_list("prefix", "first_prefix"))
        hours = UsageHour.objects.filter(Q(key__in=limited) | Q(key__in=list(first)), hour__gte=began)
        tokens = Sum(F("prompt_tokens") + F("completion_tokens"))
        used: dict[str, tuple[Decimal, Decimal]] = {}
        for key, more, charged in hours.order_by().values_list("key").annotate(tokens=tokens, charged=Sum("charged")):
            before = used.get(first.get(key, key), (Decimal(0), Decimal(0)))
            used[first.get(key, key)] = (before[0] + more, before[1] + charged)
        return used


BUDGET_STATES = ("within", "alerted", "over", "keys refused")


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget for pages; `used` is text."""

    budget: Budget
    used: str
    percent: Decimal

    @property
    def state(self) -> str:
        if self.budget.stopped:
            return "keys refused"
        return "over" if self.percent >= 100 else "alerted" if self.budget.level else "within"


def budget_views(now: datetime, whose: Q | None = None) -> list[BudgetView]:
    """All budgets, or those of `whose`, the most used first."""
    month = MonthUse(now)
    uses = [(row, month.of(row)) for row in Budget.objects.filter(whose or Q())]
    views = [BudgetView(row, describe_use(row.rules(), used), used_percent(row.rules(), used)) for row, used in uses]
    return sorted(views, key=lambda view: (-view.percent, view.budget.subject))
