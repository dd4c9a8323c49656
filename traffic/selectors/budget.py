"""Budgets with what was used of them this month."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cached_property

from traffic.models import Budget, UsageMonth
from traffic.planning.budget import BudgetUnit, describe_use, month_of, used_percent
from traffic.selectors.cost import month_costs


class MonthUse:
    """What was used of the month of `now`. Each table is read once, when the first budget needs it."""

    def __init__(self, now: datetime) -> None:
        self.month = month_of(now)
        self._now = now

    def of(self, budget: Budget) -> Decimal:
        if not budget.tenant:
            return self._machines.get(budget.deployment, Decimal(0))
        tokens, charged = self._tenants.get(budget.tenant, (Decimal(0), Decimal(0)))
        return tokens if budget.unit == BudgetUnit.TOKENS else charged

    @cached_property
    def _machines(self) -> dict[str, Decimal]:
        return month_costs(self.month, self._now)

    @cached_property
    def _tenants(self) -> dict[str, tuple[Decimal, Decimal]]:
        tenants = Budget.objects.exclude(tenant="").values("tenant")
        months = UsageMonth.objects.filter(month=self.month, tenant__in=tenants)
        return {row.tenant: (Decimal(row.tokens), row.charged) for row in months}


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget as pages show it, `used` in words."""

    budget: Budget
    used: str
    percent: Decimal


def budget_views(now: datetime) -> list[BudgetView]:
    month = MonthUse(now)
    uses = [(row, month.of(row)) for row in Budget.objects.all()]
    views = [BudgetView(row, describe_use(row.rules(), used), used_percent(row.rules(), used)) for row, used in uses]
    return sorted(views, key=lambda view: (-view.percent, view.budget.subject))
