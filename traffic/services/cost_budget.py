"""Lays down what machines may cost each month, compares it with what they did, and tells: by events, incidents and
webhooks. It stops nothing: what runs was decided by who deployed it."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import IntegrityError, transaction

from fleet.models import Deployment
from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import CostBudget
from traffic.planning.budget import BudgetPlan, MonthUse, check_rules, month_of, plan_budget
from traffic.selectors.cost import month_costs

KIND = "cost-budget"
"""Kind of the incident of a budget that has reached a threshold; its subject is the deployment, or "the fleet"."""


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
    _check(row)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(f"{row.subject} has a cost budget; change that one") from error
    _changed(row, "created", actor, now)
    return row


@transaction.atomic
def cost_budget_change(*, budget_id: int, actor: str, now: datetime, **columns: Any) -> CostBudget:
    """Change what is given.

    Raises:
        InvalidInput: no budget that can be.
    """
    row = CostBudget.objects.select_for_update().get(pk=budget_id)
    changed = {column: value for column, value in columns.items() if getattr(row, column) != value}
    for column, value in changed.items():
        setattr(row, column, value)
    _check(row)
    if changed:
        row.actor, row.changed_at = actor[:64], now
        row.save(update_fields=[*changed, "actor", "changed_at"])
        _changed(row, f"changed ({', '.join(sorted(changed))})", actor, now)
    return row


@transaction.atomic
def cost_budget_delete(*, budget_id: int, actor: str, now: datetime) -> None:
    """Forget a budget, and what it announced."""
    row = CostBudget.objects.select_for_update().get(pk=budget_id)
    incidents_close(kind=KIND, subject=row.subject, resolution=f"{actor} removed the budget", now=now)
    row.delete()
    _event("removed", f"{row} removed, by {actor}", Tone.WARN, row, actor, now)


def cost_budgets_follow(*, now: datetime) -> list[str]:
    """Compare every budget with what its machines cost this month. Returns the subjects about which there is news."""
    rows = list(CostBudget.objects.all())
    if not rows:
        return []
    spent = month_costs(month_of(now), now)
    return [row.subject for row in rows if _follow(row, spent.get(row.deployment, Decimal(0)), now)]


def _follow(row: CostBudget, spent: Decimal, now: datetime) -> bool:
    plan = plan_budget(row.rules(), MonthUse(money=spent), row.standing(), now)
    return plan.standing != row.standing() and _apply(row, plan, now)


@transaction.atomic
def _apply(row: CostBudget, plan: BudgetPlan, now: datetime) -> bool:
    """Take a budget to where it stands. False: somebody changed it meanwhile, and the next pass looks again."""
    as_planned = CostBudget.objects.filter(pk=row.pk, changed_at=row.changed_at, month=row.month, level=row.level)
    standing = plan.standing
    if not as_planned.update(month=standing.month, level=standing.level):
        return False
    text = "; ".join(plan.changes)
    if text:
        _event("reached", f"{row.subject}: {text}", Tone.WARN if standing.level else Tone.OK, row, "switchyard", now)
    resolution = text or f"{standing.month:%B %Y} began"
    incidents_close(kind=KIND, subject=row.subject, resolution=resolution, now=now)
    if standing.level:
        evidence = {
            "deployment": row.deployment,
            "month": f"{standing.month:%Y-%m}",
            "threshold_percent": standing.level,
            "used_percent": f"{plan.used_percent:.1f}",
        }
        summary = f"machines of {row.subject}: {text}"
        incident_open(kind=KIND, subject=row.subject, summary=summary, evidence=evidence, now=now)
    return True


def _check(row: CostBudget) -> None:
    try:
        check_rules(row.rules())
    except ValueError as error:
        field = "thresholds" if "threshold" in str(error) or "per cents" in str(error) else "money_per_month"
        message = str(error) if field == "thresholds" else "a budget is more than 0 US dollars"
        raise InvalidInput(field=field, rule="budget", message=message) from error


def _changed(row: CostBudget, what: str, actor: str, now: datetime) -> None:
    message = f"{row} {what}: {row.money_per_month:,.2f} USD a month, by {actor}"
    _event(what.split(" ", maxsplit=1)[0], message, Tone.WARN, row, actor, now)


def _event(what: str, message: str, tone: Tone, row: CostBudget, actor: str, now: datetime) -> None:
    event_record(
        kind=f"cost-budget.{what}", message=message, tone=tone, now=now, actor=actor[:64], deployment=row.deployment,
        detail={"money_per_month": str(row.money_per_month)},
    )  # fmt: skip
    live.push("usage")
