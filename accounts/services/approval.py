"""Two-person approval of actions on the whole fleet that a rule requires: one person requests, another admin approves,
and the action runs in the transaction of the approval.

Apps register their actions. Requesters cannot approve their own requests, and removing a rule requires approval."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction

from accounts.models import Approval, ApprovalRule, ApprovalState
from accounts.selectors import second_persons
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput, Refusal
from kernel.tones import Tone

WAITS = timedelta(hours=24)
"""Requests expire after a day, because the fleet has changed since."""

Perform = Callable[[Mapping[str, Any], str, datetime], str]
"""(arguments, requester, now) -> the outcome in a few words. Raises a Refusal if the action fails."""


@dataclass(frozen=True, slots=True)
class FleetAction:
    """An action that may need approval. `title` names it on pages. `settable`: a rule decides whether it does."""

    name: str
    title: str
    perform: Perform
    settable: bool = True


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A request with its arguments and reason. `secrets`: arguments that are never shown."""

    summary: str
    arguments: Mapping[str, Any]
    actor: str
    now: datetime
    why: str = ""
    deployment: str = ""
    region: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)


_actions: dict[str, FleetAction] = {}
RequestListener = Callable[[Approval], None]
_listeners: list[RequestListener] = []


def fleet_action_register(action: FleetAction) -> None:
    """Registers an action. Called once per action when its app is ready."""
    _actions[action.name] = action


def approval_listen(listener: RequestListener) -> None:
    """Registers a function that is called with each new request, in its transaction. Called once when its app is
    ready."""
    _listeners.append(listener)


def fleet_actions() -> tuple[FleetAction, ...]:
    return tuple(_actions[name] for name in sorted(_actions) if _actions[name].settable)


def requires_approval(name: str) -> bool:
    return ApprovalRule.objects.filter(action=name, required=True).exists()


def is_two_person_rule_on() -> bool:
    return ApprovalRule.objects.filter(required=True).exists()


@transaction.atomic
def approval_request(name: str, request: ApprovalRequest) -> Approval:
    """Store a request. It takes effect when another user who is an admin now approves it."""
    row = Approval.objects.create(
        action=name,
        summary=request.summary,
        arguments=dict(request.arguments),
        secrets=dict(request.secrets),
        approvers=second_persons(request.actor),
        deployment=request.deployment,
        region=request.region,
        why=request.why[:200],
        requested_by=request.actor[:64],
        requested_at=request.now,
        expires_at=request.now + WAITS,
    )
    _event(row, "requested", f"{request.actor} requests approval: {request.summary}", request.actor, request.now)
    for listener in _listeners:
        listener(row)
    return row


@transaction.atomic
def approval_approve(*, approval_id: int, actor: str, now: datetime) -> Approval:
    """Approve a request and run its action. If the action fails, the request is `failed`, with the reason. Raises
    Conflict if it is decided or expired, if it is the approver's own or of a program that the approver made, if the
    approver was not an admin at the time of the request, or if its action no longer exists."""
    row = _pending(approval_id, now)
    if row.requested_by == actor[:64]:
        raise Conflict("you cannot approve your own request; another admin must")
    if not User.objects.filter(pk__in=row.approvers, username=actor).exists():
        raise Conflict(
            "you were not an admin when this was requested, or created the program that requests it; another admin "
            "must approve it"
        )
    known = _actions.get(row.action)
    if known is None:
        raise Conflict(f"this release knows no action {row.action!r} any more; reject the request")
    try:
        with transaction.atomic():
            outcome = known.perform({**row.arguments, **row.secrets}, row.requested_by, now)
        state = ApprovalState.DONE
    except Refusal as refused:
        state, outcome = ApprovalState.FAILED, str(refused)
    return _decide(row, state, outcome, actor, now)


@transaction.atomic
def approval_reject(*, approval_id: int, actor: str, now: datetime, why: str = "") -> Approval:
    """Reject or withdraw a request. Raises Conflict if it is decided or expired."""
    row = _pending(approval_id, now)
    state = ApprovalState.WITHDRAWN if row.requested_by == actor[:64] else ApprovalState.REJECTED
    return _decide(row, state, why, actor, now)


@transaction.atomic
def approvals_withdraw(*, requester: str, actor: str, now: datetime, why: str) -> int:
    """Withdraw all requests of a deactivated user. Returns how many."""
    rows = Approval.objects.select_for_update().filter(state=ApprovalState.PENDING.value, requested_by=requester[:64])
    for row in rows:
        _decide(row, ApprovalState.WITHDRAWN, why, actor, now)
    return len(rows)


@transaction.atomic
def approvals_expire(*, now: datetime) -> int:
    """End all expired requests. Returns how many."""
    due = list(Approval.objects.select_for_update().filter(state=ApprovalState.PENDING.value, expires_at__lte=now))
    for row in due:
        _decide(row, ApprovalState.EXPIRED, "not decided in time", "switchyard", now)
    return len(due)


@transaction.atomic
def approval_rule_set(*, name: str, required: bool, actor: str, now: datetime) -> ApprovalRule | Approval:
    """Require two-person approval, or remove the requirement, which needs approval: then it returns the request. Raises
    InvalidInput if there is no such action."""
    known = {action.name: action.title for action in fleet_actions()}
    if name not in known:
        raise InvalidInput(
            field="action", rule="exists", message=f"there is no action {name!r}; there are: {', '.join(known)}"
        )
    if not required and requires_approval(name):
        summary = f"stop requiring approval: {known[name].lower()}"
        return approval_request(RELAX.name, ApprovalRequest(summary, {"action": name}, actor, now))
    return _rule(name, required, actor, now)


def _rule(name: str, required: bool, actor: str, now: datetime) -> ApprovalRule:
    row, _ = ApprovalRule.objects.update_or_create(
        action=name, defaults={"required": required, "actor": actor[:64], "changed_at": now}
    )
    event_record(kind="approval.rule", message=f"{row}, set by {actor}", now=now, actor=actor[:64])
    return row


def _relax(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    return str(_rule(str(arguments["action"]), False, actor, now))


RELAX = FleetAction("relax-approvals", "Stop requiring two-person approval", _relax, settable=False)


def _pending(approval_id: int, now: datetime) -> Approval:
    row = Approval.objects.select_for_update().get(pk=approval_id)
    if row.state != ApprovalState.PENDING:
        raise Conflict(f"request {row.pk} is {row.state} already")
    if row.expires_at <= now:
        raise Conflict(
            f"request {row.pk} waited for longer than {WAITS.total_seconds() / 3600:.0f} hours; request it again"
        )
    return row


def _decide(row: Approval, state: ApprovalState, outcome: str, actor: str, now: datetime) -> Approval:
    row.state, row.outcome, row.decided_by, row.decided_at = state.value, outcome, actor[:64], now
    row.secrets = {}
    row.save(update_fields=["state", "outcome", "decided_by", "decided_at", "secrets"])
    what = "approved" if state in {ApprovalState.DONE, ApprovalState.FAILED} else state.value
    message = f"{row.summary} (requested by {row.requested_by}) {what} by {actor}" + (f": {outcome}" if outcome else "")
    _event(row, what, message, actor, now)
    return row


def _event(row: Approval, what: str, message: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"approval.{what}",
        message=message,
        now=now,
        tone=row.tone if what != "requested" else Tone.MOVING,
        actor=actor[:64],
        deployment=row.deployment,
        region=row.region,
        detail={"approval": row.pk, "action": row.action},
    )
    live.push("approvals", str(row.pk))
