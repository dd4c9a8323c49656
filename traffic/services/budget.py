"""Budgets of tenants: for tokens, for what they cost by their prices, or both. One that stops its tenant does so by the
routing tables of every region."""

from datetime import datetime
from typing import Any

from django.db import transaction

from traffic.models import Budget, UsageMonth
from traffic.planning.budget import BudgetStanding, MonthUse, month_of
from traffic.services.key import key_ring_change
from traffic.services.threshold import BudgetKind, budget_alter, budget_follow, budget_lay_down, budget_remove


def _limits(row: Budget) -> str:
    limits = [f"{row.tokens_per_month:,} tokens"] if row.tokens_per_month else []
    limits += [f"{row.money_per_month:,.2f} USD"] if row.money_per_month else []
    return f"{' and '.join(limits)} a month{', then its keys are refused' if row.hard_stop else ''}"


def _columns(row: Budget, standing: BudgetStanding, now: datetime) -> dict[str, Any]:
    stopped_at = row.stopped_at if standing.stopped == row.stopped else now if standing.stopped else None
    return {"stopped": standing.stopped, "stopped_at": stopped_at}


def _after(row: Budget, standing: BudgetStanding) -> None:
    if standing.stopped != row.stopped:
        key_ring_change()


OF_TENANTS: BudgetKind[Budget] = BudgetKind(
    event="budget",
    incident="tenant-budget",
    limit_field="tokens_per_month",
    limit_advice="; to serve a tenant nothing, revoke its keys",
    subject=lambda row: row.tenant,
    whose=lambda row: row.tenant,
    limits=_limits,
    evidence=lambda row, standing: {"tenant": row.tenant, "keys_refused": standing.stopped},
    detail=lambda row: {"tenant": row.tenant},
    columns=_columns,
    after=_after,
)


@transaction.atomic
def budget_create(*, tenant: str, actor: str, now: datetime, **columns: Any) -> Budget:
    """A budget for a tenant, from this month on.

    Raises:
        InvalidInput: no budget that can be.
        Conflict: the tenant has one.
    """
    row = Budget(tenant=tenant, actor=actor[:64], changed_at=now, month=month_of(now), **columns)
    budget_lay_down(OF_TENANTS, row, now=now, conflict=f"{tenant} has a budget; change that one")
    return row


@transaction.atomic
def budget_change(*, tenant: str, actor: str, now: datetime, **columns: Any) -> Budget:
    """Change what is given.

    Raises:
        InvalidInput: no budget that can be.
    """
    row = Budget.objects.select_for_update().get(tenant=tenant)
    budget_alter(OF_TENANTS, row, columns, actor=actor, now=now)
    return row


@transaction.atomic
def budget_delete(*, tenant: str, actor: str, now: datetime) -> None:
    """Forget a tenant's budget; if it had stopped the tenant, its keys are accepted again."""
    row = Budget.objects.select_for_update().get(tenant=tenant)
    budget_remove(OF_TENANTS, row, actor=actor, now=now)
    if row.stopped:
        key_ring_change()


def budgets_follow(*, now: datetime) -> list[str]:
    """Compare every budget with what its tenant used of this month. Returns the tenants about whom there is news."""
    rows = list(Budget.objects.all())
    months = UsageMonth.objects.filter(month=month_of(now), tenant__in=[row.tenant for row in rows])
    used = {row.tenant: row.use() for row in months}
    return [row.tenant for row in rows if budget_follow(OF_TENANTS, row, used.get(row.tenant, MonthUse()), now=now)]
