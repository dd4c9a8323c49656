"""Lists of the settings that are not about users: credentials, grants, approvals, webhooks, allowances and rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.models import User
from django.db.models import QuerySet

from accounts.models import (
    ApiToken,
    Approval,
    ApprovalRule,
    ApprovalState,
    Grant,
    LoginSession,
    TokenState,
)
from accounts.selectors import service_accounts_described, visible_sessions, visible_tokens
from accounts.services.approval import fleet_actions
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.lists import Column, List, plain
from controlplane.dashboard.settings.data import group_names
from fleet.deployments.models import Deployment
from fleet.faults.models import FaultRule
from fleet.faults.planning.views import SETTABLE_RULES, Rule, RuleMode
from fleet.webhooks.models import Webhook
from kernel.access import Scope
from models_registry.versions.models import EngineAllowance
from models_registry.versions.planning.engine_arguments import ENGINES

OFFERED = 200
"""Names that a form offers."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    token: ApiToken
    state: TokenState


@dataclass(frozen=True, slots=True)
class Grantable:
    """Names that the form for a grant offers."""

    users: tuple[str, ...]
    groups: tuple[str, ...]
    deployments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuleRow:
    name: str
    title: str
    value: str
    tone: str
    actor: str
    changed_at: datetime | None


def _tokens(request: PageRequest) -> "QuerySet[ApiToken]":
    return visible_tokens(request.caller.user, request.caller.access).filter(revoked_at=None)


def _token_rows(tokens: Sequence[ApiToken], now: datetime) -> list[TokenRow]:
    return [TokenRow(token, token.state_at(now)) for token in tokens]


def _service_accounts(request: PageRequest) -> tuple[str, ...]:
    """Those for which the user may create tokens."""
    names = service_accounts_described().values_list("user__username", flat=True)
    return tuple(names) if request.caller.access.administer else ()


def _sessions(request: PageRequest) -> "QuerySet[LoginSession]":
    return visible_sessions(request.caller.user, request.caller.access, request.now)


def _grantable(_: PageRequest) -> Grantable:
    users = User.objects.filter(is_active=True).order_by("username").values_list("username", flat=True)[:OFFERED]
    deployments = Deployment.objects.order_by("name").values_list("name", flat=True)[:OFFERED]
    return Grantable(tuple(users), group_names(), tuple(deployments))


def _approval_rules(_: PageRequest) -> list[RuleRow]:
    rules = ApprovalRule.objects.in_bulk()
    return [_approval_rule(action.name, action.title, rules.get(action.name)) for action in fleet_actions()]


def _approval_rule(name: str, title: str, rule: ApprovalRule | None) -> RuleRow:
    required = rule is not None and rule.required
    actor, at = (rule.actor, rule.changed_at) if rule else ("", None)
    return RuleRow(name, title, REQUIRED if required else NOT_REQUIRED, "ok" if required else "idle", actor, at)


def _fault_rules(_: PageRequest) -> list[RuleRow]:
    rules = FaultRule.objects.in_bulk()
    return [_fault_rule(rule, rules.get(rule.value)) for rule in SETTABLE_RULES]


def _fault_rule(rule: Rule, row: FaultRule | None) -> RuleRow:
    mode = RuleMode(row.mode) if row else RuleMode.ON
    tone = {RuleMode.ON: "ok", RuleMode.SHADOW: "warn", RuleMode.OFF: "idle"}[mode]
    actor, at = (row.actor, row.changed_at) if row else ("", None)
    return RuleRow(rule.value, rule.value.replace("_", " ").capitalize(), mode.value, tone, actor, at)


REQUIRED, NOT_REQUIRED = "required", "not required"
DECIDED = tuple(state.value for state in ApprovalState if state is not ApprovalState.PENDING)
TOKEN_LIST: List[TokenRow] = List(
    name="tokens",
    prefix="tokens-",
    columns=(
        Column("token", "Token", lambda row: f"{row.token.name} sw_{row.token.prefix}", ("name",)),
        Column("state", "State", lambda row: row.state, ("expires_at",)),
        Column("scope", "Scope", lambda row: row.token.scope, ("scope",), choices=tuple(Scope)),
        Column("user", "User", lambda row: row.token.user.get_username(), ("user__username",), "wide"),
        Column(
            "used", "Last used", lambda row: row.token.last_used_at, ("last_used_at",), "number wide",
            is_newest_first=True,
        ),
        Column("expires", "Expires, UTC", lambda row: row.token.expires_at, ("expires_at",), "number wide"),
    ),
    query=_tokens,
    rows=_token_rows,
    order=("-id",),
    find=("name", "prefix", "user__username"),
    above=_service_accounts,
)  # fmt: skip
SESSION_LIST: List[LoginSession] = List(
    name="sessions",
    prefix="sessions-",
    columns=(
        plain("user__username", "User", name="user"),
        plain("address", "From"),
        plain("browser", "Browser", "wide"),
        plain("method", "Method", "wide"),
        plain("seen_at", "Last seen", "number"),
    ),
    query=_sessions,
    order=("-id",),
    find=("user__username", "address", "browser"),
)
GRANT_LIST: List[Grant] = List(
    name="grants",
    prefix="grants-",
    columns=(
        plain("deployment", "Deployment"),
        Column("user", "User or members of", lambda row: str(row.user or row.group), ("user__username", "group__name")),
        plain("role", "Role"),
        plain("created_by", "By", "wide"),
        plain("created_at", "Since", "number wide"),
    ),
    query=lambda request: Grant.objects.select_related("user", "group"),
    order=("deployment", "id"),
    find=("deployment", "user__username", "group__name"),
    above=_grantable,
)
PENDING_LIST: List[Approval] = List(
    name="pending-requests",
    prefix="pending-",
    columns=(
        plain("summary", "Request"),
        plain("requested_by", "By"),
        plain("requested_at", "Since", "number wide"),
        plain("expires_at", "Expires", "number wide"),
    ),
    query=lambda request: Approval.objects.filter(state=ApprovalState.PENDING.value),
    order=("-id",),
    find=("summary", "requested_by", "why"),
)
APPROVAL_RULE_LIST: List[RuleRow] = List(
    name="approval-rules",
    prefix="rules-",
    columns=(
        Column("action", "Action", lambda row: row.title),
        Column("approval", "Approval", lambda row: row.value, choices=(REQUIRED, NOT_REQUIRED)),
        Column("actor", "Set by", lambda row: row.actor, css="wide"),
        Column("changed", "Since", lambda row: row.changed_at, css="number wide", is_newest_first=True),
    ),
    query=_approval_rules,
    find=("action",),
    by_value=True,
)
DECIDED_LIST: List[Approval] = List(
    name="decided-requests",
    prefix="decided-",
    columns=(
        plain("summary", "Request"),
        plain("state", "State", choices=DECIDED),
        plain("requested_by", "By", "wide"),
        plain("decided_by", "Decided by", "wide"),
        plain("outcome", "Outcome", "wide"),
        plain("decided_at", "Decided", "number"),
    ),
    query=lambda request: Approval.objects.exclude(state=ApprovalState.PENDING.value),
    order=("-id",),
    find=("summary", "requested_by", "decided_by", "outcome"),
)
WEBHOOK_LIST: List[Webhook] = List(
    name="webhooks",
    prefix="webhooks-",
    columns=(
        Column("webhook", "Webhook", lambda row: row.name),
        Column("state", "State", lambda row: "enabled" if row.enabled else "disabled", choices=("enabled", "disabled")),
        Column("url", "URL", lambda row: row.shown_url, css="wide"),
        Column("events", "Events", lambda row: ", ".join(row.events) or "every event", css="wide"),
    ),
    query=lambda request: Webhook.objects.all(),
    order=("name",),
    find=("webhook", "url", "events"),
    by_value=True,
)
"""By value, so that a search never compares the secret parts of a URL."""
ALLOWANCE_LIST: List[EngineAllowance] = List(
    name="allowances",
    prefix="allowances-",
    columns=(
        plain("name", "Option or variable"),
        plain("engine", "Engine", choices=ENGINES),
        plain("why", "Reason"),
        plain("actor", "Allowed by", "wide"),
        plain("created_at", "Since", "number wide"),
    ),
    query=lambda request: EngineAllowance.objects.all(),
    order=("engine", "name"),
    find=("name", "engine", "why"),
    above=lambda request: ENGINES,
)
FAULT_RULE_LIST: List[RuleRow] = List(
    name="fault-rules",
    prefix="rules-",
    columns=(
        Column("rule", "Rule", lambda row: row.title),
        Column("mode", "Mode", lambda row: row.value, choices=tuple(RuleMode)),
        Column("actor", "Set by", lambda row: row.actor, css="wide"),
        Column("changed", "Since", lambda row: row.changed_at, css="number wide", is_newest_first=True),
    ),
    query=_fault_rules,
    find=("rule",),
    by_value=True,
)
