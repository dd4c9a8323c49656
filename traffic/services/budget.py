"""Lays down budgets of tenants, compares them with what was used, and tells: by events, incidents and webhooks, and
where a budget stops its tenant, by the routing tables of every region."""

from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import Budget, UsageMonth
from traffic.planning.budget import BudgetPlan, BudgetRules, MonthUse, check_rules, month_of, plan_budget
from traffic.services.key import key_ring_change

KIND = "tenant-budget"
"""Kind of the incident of a tenant that has reached a threshold; its subject is the tenant."""


@transaction.atomic
def budget_create(*, tenant: str, actor: str, now: datetime, **columns: Any) -> Budget:
    """A budget for a tenant, from this month on.

    Raises:
        InvalidInput: no budget that can be.
        Conflict: the tenant has one.
    """
    row = Budget(tenant=tenant, actor=actor[:64], changed_at=now, month=month_of(now), **columns)
    _check(row.rules())
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(f"{tenant} has a budget; change that one") from error
    _changed(row, "created", actor, now)
    return row


@transaction.atomic
def budget_change(*, tenant: str, actor: str, now: datetime, **columns: Any) -> Budget:
    """Change what is given.

    Raises:
        InvalidInput: no budget that can be.
    """
    row = Budget.objects.select_for_update().get(tenant=tenant)
    changed = {column: value for column, value in columns.items() if getattr(row, column) != value}
    for column, value in changed.items():
        setattr(row, column, value)
    _check(row.rules())
    if changed:
        row.actor, row.changed_at = actor[:64], now
        row.save(update_fields=[*changed, "actor", "changed_at"])
        _changed(row, f"changed ({', '.join(sorted(changed))})", actor, now)
    return row


@transaction.atomic
def budget_delete(*, tenant: str, actor: str, now: datetime) -> None:
    """Forget a tenant's budget; if it had stopped the tenant, its keys are accepted again."""
    row = Budget.objects.select_for_update().get(tenant=tenant)
    incidents_close(kind=KIND, subject=tenant, resolution=f"{actor} removed the budget", now=now)
    row.delete()
    _event("removed", f"budget of {tenant} removed, by {actor}", Tone.WARN, tenant, actor, now)
    if row.stopped:
        key_ring_change()


def budgets_follow(*, now: datetime) -> list[str]:
    """Compare every budget with what its tenant used of this month. Returns the tenants about whom there is news."""
    month = month_of(now)
    used = {row.tenant: row.use() for row in UsageMonth.objects.filter(month=month, tenant__in=_tenants())}
    return [row.tenant for row in Budget.objects.all() if budget_follow(row, used.get(row.tenant, MonthUse()), now)]


def _tenants() -> list[str]:
    return list(Budget.objects.values_list("tenant", flat=True))


def budget_follow(row: Budget, use: MonthUse, now: datetime) -> bool:
    """Take one budget to where it stands by this use. Returns whether there is news; not if it changed meanwhile."""
    plan = plan_budget(row.rules(), use, row.standing(), now)
    return plan.standing != row.standing() and _apply(row, plan, now)


@transaction.atomic
def _apply(row: Budget, plan: BudgetPlan, now: datetime) -> bool:
    """Take a budget to where it stands. False: somebody changed it meanwhile, and the next pass looks again."""
    as_planned = Budget.objects.filter(
        pk=row.pk, changed_at=row.changed_at, month=row.month, level=row.level, stopped=row.stopped
    )
    standing = plan.standing
    columns: dict[str, Any] = {"month": standing.month, "level": standing.level, "stopped": standing.stopped}
    if standing.stopped != row.stopped:
        columns["stopped_at"] = now if standing.stopped else None
    if not as_planned.update(**columns):
        return False
    if plan.changes:
        tone = Tone.BAD if standing.stopped else Tone.WARN if standing.level else Tone.OK
        _event("reached", f"{row.tenant}: {'; '.join(plan.changes)}", tone, row.tenant, "switchyard", now)
    if (standing.month, standing.level) != (row.month, row.level):
        _tell(row, plan, now)
    if standing.stopped != row.stopped:
        key_ring_change()
    return True


def _tell(row: Budget, plan: BudgetPlan, now: datetime) -> None:
    """One incident for the threshold that is reached. Each is opened anew, so each is told to webhooks."""
    level, text = plan.standing.level, "; ".join(plan.changes)
    incidents_close(kind=KIND, subject=row.tenant, resolution=text or f"{plan.standing.month:%B %Y} began", now=now)
    if level:
        evidence = {
            "tenant": row.tenant,
            "month": f"{plan.standing.month:%Y-%m}",
            "threshold_percent": level,
            "used_percent": f"{plan.used_percent:.1f}",
            "keys_refused": plan.standing.stopped,
        }
        incident_open(kind=KIND, subject=row.tenant, summary=f"{row.tenant} {text}", evidence=evidence, now=now)


def _check(rules: BudgetRules) -> None:
    try:
        check_rules(rules)
    except ValueError as error:
        field = "thresholds" if "threshold" in str(error) or "per cents" in str(error) else "tokens_per_month"
        raise InvalidInput(field=field, rule="budget", message=str(error)) from error


def _changed(row: Budget, what: str, actor: str, now: datetime) -> None:
    limits = [f"{row.tokens_per_month:,} tokens"] if row.tokens_per_month else []
    limits += [f"{row.money_per_month:,.2f} USD"] if row.money_per_month else []
    then = ", then its keys are refused" if row.hard_stop else ""
    message = f"budget of {row.tenant} {what}: {' and '.join(limits)} a month{then}, by {actor}"
    _event(what.split(" ", maxsplit=1)[0], message, Tone.WARN, row.tenant, actor, now)


def _event(what: str, message: str, tone: Tone, tenant: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"budget.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail={"tenant": tenant}
    )
    live.push("usage")
