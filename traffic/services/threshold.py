"""What budgets of every kind do: they are laid down, compared with what was used, and tell by events, incidents and
webhooks where they stand. A kind says whose a budget is, what it is called, and what else follows from where it stands.

A budget stands at what was last announced. Whoever writes where it stands does so only if nobody has changed it since
it was looked at; else the next pass looks again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.db import IntegrityError, transaction

from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import Budget, CostBudget
from traffic.planning.budget import BudgetPlan, BudgetStanding, MonthUse, check_rules, plan_budget

R = TypeVar("R", Budget, CostBudget)


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class BudgetKind(Generic[R]):
    """`event`: what kinds of events begin with; `incident`: the kind of incidents, whose subject is `subject` of a row.
    `limits`: its limits in words; `limit_field`: the field to name where a limit cannot be, and `limit_advice` what to
    do instead. `whose`: how an incident's sentence begins.

    `columns`: where it stands beside month and level, as columns; `evidence` and `detail`: whose it is, for incidents
    and for events. `after`: what follows in the same transaction, given the row as it was and where it stands now.
    """

    event: str
    incident: str
    limit_field: str
    subject: Callable[[R], str]
    whose: Callable[[R], str]
    limits: Callable[[R], str]
    evidence: Callable[[R, BudgetStanding], Mapping[str, Any]]
    detail: Callable[[R], Mapping[str, Any]]
    limit_advice: str = ""
    columns: Callable[[R, BudgetStanding, datetime], Mapping[str, Any]] = field(default=_nothing)
    after: Callable[[R, BudgetStanding], object] = field(default=_nothing)


def budget_lay_down(kind: BudgetKind[R], row: R, *, now: datetime, conflict: str) -> None:
    """Write a new budget. Part of the caller's transaction.

    Raises:
        InvalidInput: no budget that can be.
        Conflict: there is one.
    """
    _check(kind, row)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(conflict) from error
    _changed(kind, row, "created", now)


def budget_alter(kind: BudgetKind[R], row: R, columns: Mapping[str, Any], *, actor: str, now: datetime) -> None:
    """Change what is given and differs, of a row that the caller's transaction has locked.

    Raises:
        InvalidInput: no budget that can be.
    """
    changed: dict[str, Any] = {name: value for name, value in columns.items() if getattr(row, name) != value}
    for column, value in changed.items():
        setattr(row, column, value)
    _check(kind, row)
    if changed:
        row.actor, row.changed_at = actor[:64], now
        row.save(update_fields=[*changed, "actor", "changed_at"])
        _changed(kind, row, f"changed ({', '.join(sorted(changed))})", now)


def budget_remove(kind: BudgetKind[R], row: R, *, actor: str, now: datetime) -> None:
    """Forget a budget and what it announced, of a row that the caller's transaction has locked."""
    incidents_close(kind=kind.incident, subject=kind.subject(row), resolution=f"{actor} removed the budget", now=now)
    row.delete()
    _event(kind, row, "removed", f"{row} removed, by {actor}", Tone.WARN, actor, now)


def budget_follow(kind: BudgetKind[R], row: R, use: MonthUse, *, now: datetime) -> bool:
    """Take a budget to where it stands by this use. Returns whether there is news; not if it changed meanwhile."""
    plan = plan_budget(row.rules(), use, row.standing(), now)
    return plan.standing != row.standing() and _apply(kind, row, plan, now)


@transaction.atomic
def _apply(kind: BudgetKind[R], row: R, plan: BudgetPlan, now: datetime) -> bool:
    standing, seen = plan.standing, {"month": row.month, "level": row.level, "changed_at": row.changed_at}
    more = kind.columns(row, standing, now)
    seen |= {column: getattr(row, column) for column in more}
    rows = type(row)._default_manager.filter(pk=row.pk, **seen)
    if not rows.update(month=standing.month, level=standing.level, **more):
        return False
    if plan.changes:
        tone = Tone.BAD if standing.stopped else Tone.WARN if standing.level else Tone.OK
        said = f"{kind.subject(row)}: {'; '.join(plan.changes)}"
        _event(kind, row, "reached", said, tone, "switchyard", now)
    if (standing.month, standing.level) != (row.month, row.level):
        _tell(kind, row, plan, now)
    kind.after(row, standing)
    return True


def _tell(kind: BudgetKind[R], row: R, plan: BudgetPlan, now: datetime) -> None:
    """One incident for the threshold that is reached. Each is opened anew, so each is told to webhooks."""
    standing, text, subject = plan.standing, "; ".join(plan.changes), kind.subject(row)
    resolution = text or f"{standing.month:%B %Y} began"
    incidents_close(kind=kind.incident, subject=subject, resolution=resolution, now=now)
    if standing.level:
        evidence = {
            **kind.evidence(row, standing),
            "month": f"{standing.month:%Y-%m}",
            "threshold_percent": standing.level,
            "used_percent": f"{plan.used_percent:.1f}",
        }
        summary = f"{kind.whose(row)} {text}"
        incident_open(kind=kind.incident, subject=subject, summary=summary, evidence=evidence, now=now)


def _check(kind: BudgetKind[R], row: R) -> None:
    try:
        check_rules(row.rules())
    except ValueError as error:
        is_of_thresholds = "threshold" in str(error) or "per cents" in str(error)
        name = "thresholds" if is_of_thresholds else kind.limit_field
        advice = "" if is_of_thresholds else kind.limit_advice
        raise InvalidInput(field=name, rule="budget", message=f"{error}{advice}") from error


def _changed(kind: BudgetKind[R], row: R, what: str, now: datetime) -> None:
    message = f"{row} {what}: {kind.limits(row)}, by {row.actor}"
    _event(kind, row, what.split(" ", maxsplit=1)[0], message, Tone.WARN, row.actor, now)


def _event(kind: BudgetKind[R], row: R, what: str, message: str, tone: Tone, actor: str, now: datetime) -> None:
    whose = kind.detail(row)
    event_record(
        kind=f"{kind.event}.{what}", message=message, tone=tone, now=now, actor=actor[:64],
        deployment=str(whose.get("deployment", "")), detail=dict(whose),
    )  # fmt: skip
    live.push("usage")
