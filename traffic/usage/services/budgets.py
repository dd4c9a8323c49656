"""Creates, changes and deletes budgets, compares them with usage, and announces each change of state with an event and
an incident. A hard stop takes effect through the routing tables of every region. An announcement is written only if its
row is still the one that was compared; otherwise the next pass compares again."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import IntegrityError, transaction

from fleet.deployments.models import Deployment
from fleet.faults.services.incidents import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.keys.models import ApplicationKey
from traffic.keys.services import key_ring_change
from traffic.usage.models import Budget
from traffic.usage.planning.counting import (
    BudgetPlan,
    BudgetUnit,
    check_alert_at,
    check_limit,
    describe_limit,
    month_of,
    plan_budget,
)
from traffic.usage.selectors.budgets import MonthUse

INCIDENT = "budget"


@transaction.atomic
def budget_create(
    *, actor: str, now: datetime, tenant: str = "", key: str = "", deployment: str = "", unit: str, **columns: Any
) -> Budget:
    """Creates a budget for a tenant, a key, a deployment's machines, or all machines, from this month on. Raises
    InvalidInput if the budget is invalid, or the key or deployment does not exist. Raises Conflict if there is one in
    this unit. A rotated key's budget names the first key."""
    row = Budget(
        tenant=tenant, key=_budget_key(key), deployment=deployment, unit=unit, actor=actor[:64], changed_at=now,
        month=month_of(now), **columns,
    )  # fmt: skip
    _check_subject(row)
    _check_rules(row)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(f"{row} exists already; change that one") from error
    _record_change(row, "created", now)
    return row


@transaction.atomic
def budget_change(*, budget_id: int, actor: str, now: datetime, **columns: Any) -> Budget:
    """Changes the given fields. Raises InvalidInput if the budget would be invalid."""
    row = Budget.objects.select_for_update().get(pk=budget_id)
    changed: dict[str, Any] = {name: value for name, value in columns.items() if getattr(row, name) != value}
    for column, value in changed.items():
        setattr(row, column, value)
    _check_rules(row)
    if changed:
        row.actor, row.changed_at = actor[:64], now
        row.save(update_fields=[*changed, "actor", "changed_at"])
        _record_change(row, f"changed ({', '.join(sorted(changed))})", now)
    return row


@transaction.atomic
def budget_delete(*, budget_id: int, actor: str, now: datetime) -> None:
    """Deletes a budget and closes its incident. Keys of a tenant that it had stopped are accepted again."""
    row = Budget.objects.select_for_update().get(pk=budget_id)
    incidents_close(kind=INCIDENT, subject=row.subject, resolution=f"{actor} removed the budget", now=now)
    row.delete()
    _budget_event(row, "removed", f"{row} removed, by {actor}", Tone.WARN, actor, now)
    if row.stopped:
        key_ring_change()


def budgets_follow(*, now: datetime) -> list[str]:
    """Compares every budget with this month's usage. Returns the subjects of those that changed state."""
    month = MonthUse(now)
    return [row.subject for row in Budget.objects.all() if budget_follow(row, month.of(row), now=now)]


def budget_follow(row: Budget, used: Decimal, *, now: datetime) -> bool:
    """Announces a budget's state. Returns False if it is unchanged or the budget changed meanwhile."""
    plan = plan_budget(row.rules(), used, row.standing(), now)
    return plan.standing != row.standing() and _announce_budget(row, plan, now)


@transaction.atomic
def _announce_budget(row: Budget, plan: BudgetPlan, now: datetime) -> bool:
    standing = plan.standing
    stopped_at = row.stopped_at if standing.stopped == row.stopped else now if standing.stopped else None
    unchanged = Budget.objects.filter(
        pk=row.pk, month=row.month, level=row.level, stopped=row.stopped, changed_at=row.changed_at
    )
    if not unchanged.update(
        month=standing.month, level=standing.level, stopped=standing.stopped, stopped_at=stopped_at
    ):
        return False
    if plan.changes:
        tone = Tone.BAD if standing.stopped else Tone.WARN if standing.level else Tone.OK
        _budget_event(row, "reached", f"{row.subject}: {'; '.join(plan.changes)}", tone, "switchyard", now)
    if (standing.month, standing.level) != (row.month, row.level):
        _open_incident(row, plan, now)
    if standing.stopped != row.stopped:
        key_ring_change()
    return True


def _open_incident(row: Budget, plan: BudgetPlan, now: datetime) -> None:
    """Opens an incident for the reached alert. Each alert has its own, so that webhooks send each."""
    standing, text = plan.standing, "; ".join(plan.changes)
    resolution = text or f"{standing.month:%B %Y} began"
    incidents_close(kind=INCIDENT, subject=row.subject, resolution=resolution, now=now)
    if standing.level:
        evidence = {
            "tenant": row.tenant,
            "key": row.key,
            "deployment": row.deployment,
            "unit": row.unit,
            "month": f"{standing.month:%Y-%m}",
            "reached_percent": standing.level,
            "used_percent": f"{plan.used_percent:.1f}",
            "keys_refused": standing.stopped,
        }
        summary = f"{row.subject}: {text}"
        incident_open(kind=INCIDENT, subject=row.subject, summary=summary, evidence=evidence, now=now)


def _check_subject(row: Budget) -> None:
    if sum(map(bool, (row.tenant, row.key, row.deployment))) > 1:
        message = "a budget is for a tenant, for a key or for a deployment: give only one of them"
        raise InvalidInput(field="deployment" if row.deployment else "key", rule="budget", message=message)
    if row.deployment and not Deployment.objects.filter(name=row.deployment).exists():
        there = ", ".join(Deployment.objects.order_by("name").values_list("name", flat=True)) or "none"
        message = f"unknown deployment {row.deployment!r}; known: {there}"
        raise InvalidInput(field="deployment", rule="exists", message=message)


def _budget_key(prefix: str) -> str:
    if not prefix:
        return ""
    key = ApplicationKey.objects.filter(prefix=prefix, revoked_at=None).first()
    if key is None:
        message = f"unknown or revoked key {prefix!r}; name it by the part between sw_ and the second _"
        raise InvalidInput(field="key", rule="exists", message=message)
    return key.budget_key


def _check_rules(row: Budget) -> None:
    if row.is_of_machines and row.unit != BudgetUnit.USD:
        raise InvalidInput(field="unit", rule="budget", message="a budget of machines must be in usd")
    if row.is_of_machines and row.hard_stop:
        message = "a budget of machines can only alert: `hard_stop` refuses a tenant's keys or one key"
        raise InvalidInput(field="hard_stop", rule="budget", message=message)
    rules, field = row.rules(), "limit"
    try:
        check_limit(rules.unit, rules.limit)
        field = "alert_at"
        check_alert_at(rules.alert_at)
    except ValueError as error:
        raise InvalidInput(field=field, rule="budget", message=str(error)) from error


def _record_change(row: Budget, what: str, now: datetime) -> None:
    then = f", then {'it is' if row.key else 'its keys are'} refused" if row.hard_stop else ""
    message = f"{row} {what}: {describe_limit(row.rules())} a month{then}, by {row.actor}"
    _budget_event(row, what.split(" ", maxsplit=1)[0], message, Tone.WARN, row.actor, now)


def _budget_event(row: Budget, what: str, message: str, tone: Tone, actor: str, now: datetime) -> None:
    names = ("tenant", "key", "deployment", "unit")
    detail = {name: getattr(row, name) for name in names} | {"limit": f"{row.limit:f}"}
    event_record(
        kind=f"budget.{what}", message=message, tone=tone, now=now, actor=actor[:64], deployment=row.deployment,
        detail=detail,
    )  # fmt: skip
    live.push("usage")
