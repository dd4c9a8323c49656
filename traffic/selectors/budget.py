"""Budgets with what was used of them this month."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db.models import DecimalField, OuterRef, PositiveBigIntegerField, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce

from traffic.models import Budget, UsageMonth
from traffic.planning.budget import MonthUse, month_of, used_percent


def budgets_described(now: datetime) -> QuerySet[Budget]:
    """With `used_tokens` and `used_money` of the month of `now`."""
    used = UsageMonth.objects.filter(tenant=OuterRef("tenant"), month=month_of(now))
    tokens = Coalesce(Subquery(used.values("tokens")), Value(0), output_field=PositiveBigIntegerField())
    money = DecimalField(max_digits=32, decimal_places=12)
    charged = Coalesce(Subquery(used.values("charged")), Value(Decimal(0)), output_field=money)
    return Budget.objects.annotate(used_tokens=tokens, used_money=charged)


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget as pages show it; `percent` of the limit that is nearer."""

    budget: Budget
    used: MonthUse
    percent: Decimal


def budget_views(now: datetime) -> list[BudgetView]:
    views = []
    for row in budgets_described(now):
        used = MonthUse(getattr(row, "used_tokens", 0), getattr(row, "used_money", Decimal(0)))
        views.append(BudgetView(row, used, used_percent(row.rules(), used)))
    return sorted(views, key=lambda view: (-view.percent, view.budget.tenant))
