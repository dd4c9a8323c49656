"""Budgets of machines: what those of a deployment, or all, may cost each month. They stop nothing: what runs was
decided by who deployed it."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import transaction

from fleet.models import Deployment
from kernel.refusals import InvalidInput
from traffic.models import CostBudget
from traffic.planning.budget import MonthUse, month_of
from traffic.selectors.cost import month_costs
from traffic.services.threshold import BudgetKind, budget_alter, budget_follow, budget_lay_down, budget_remove

OF_MACHINES: BudgetKind[CostBudget] = BudgetKind(
    event="cost-budget",
    incident="cost-budget",
    limit_field="money_per_month",
    subject=lambda row: row.subject,
    whose=lambda row: f"machines of {row.subject}:",
    limits=lambda row: f"{row.money_per_month:,.2f} USD a month",
    evidence=lambda row, _: {"deployment": row.deployment},
    detail=lambda row: {"deployment": row.deployment, "money_per_month": str(row.money_per_month)},
)


@transaction.atomic
def cost_budget_create(*, deployment: str, actor: str, now: datetime, **columns: Any) -> CostBudget:
    """A budget for the machines of a deployment, from this month on; no deployment: for all machines.

    Raises:
        InvalidInput: no budget that can be, or no such deployment.
        Conflict: there is one.
    """
    if deployment and not Deployment.objects.filter(name=deployment).exists():
        there = ", ".join(Deployment.objects.order_by("name").values_list("name", flat=True)) or "none"
        message = f"there is no deployment {deployment!r}; there are: {there}"
        raise InvalidInput(field="deployment", rule="exists", message=message)
    row = CostBudget(deployment=deployment, actor=actor[:64], changed_at=now, month=month_of(now), **columns)
    budget_lay_down(OF_MACHINES, row, now=now, conflict=f"{row.subject} has a cost budget; change that one")
    return row


@transaction.atomic
def cost_budget_change(*, budget_id: int, actor: str, now: datetime, **columns: Any) -> CostBudget:
    """Change what is given.

    Raises:
        InvalidInput: no budget that can be.
    """
    row = CostBudget.objects.select_for_update().get(pk=budget_id)
    budget_alter(OF_MACHINES, row, columns, actor=actor, now=now)
    return row


@transaction.atomic
def cost_budget_delete(*, budget_id: int, actor: str, now: datetime) -> None:
    """Forget a budget, and what it announced."""
    row = CostBudget.objects.select_for_update().get(pk=budget_id)
    budget_remove(OF_MACHINES, row, actor=actor, now=now)


def cost_budgets_follow(*, now: datetime) -> list[str]:
    """Compare every budget with what its machines cost this month. Returns the subjects about which there is news."""
    rows = list(CostBudget.objects.all())
    if not rows:
        return []
    spent = month_costs(month_of(now), now)
    return [
        row.subject
        for row in rows
        if budget_follow(OF_MACHINES, row, MonthUse(money=spent.get(row.deployment, Decimal(0))), now=now)
    ]
