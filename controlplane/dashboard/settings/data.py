"""Reads what the settings show: users, roles and credentials, approvals, webhooks and rules."""

from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.models import Group, User
from django.db.models import Count

from accounts.models import (
    ROLES,
    ApiToken,
    Approval,
    ApprovalRule,
    ApprovalState,
    Grant,
    GroupRole,
    LoginSession,
    RecoveryCode,
    SecondFactor,
    ServiceAccount,
    TokenState,
)
from accounts.selectors import (
    role_by_groups,
    service_accounts_described,
    users_described,
    visible_sessions,
    visible_tokens,
)
from accounts.services.approval import fleet_actions
from controlplane.dashboard.fragments import Caller
from fleet.deployments.models import Deployment
from fleet.faults.models import FaultRule
from fleet.faults.planning.views import SETTABLE_RULES, Rule, RuleMode
from fleet.webhooks.models import Webhook, WebhookDelivery
from fleet.webhooks.planner import WebhookEvent
from kernel.access import Role
from models_registry.versions.models import EngineAllowance
from models_registry.versions.planning.engine_arguments import ENGINES

SHOWN = 200
"""Rows of a list; the API pages through more."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    token: ApiToken
    state: TokenState


@dataclass(frozen=True, slots=True)
class TokensView:
    rows: tuple[TokenRow, ...]
    service_accounts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserRow:
    user: User
    role: Role
    groups: tuple[str, ...]
    account: ServiceAccount | None = None


@dataclass(frozen=True, slots=True)
class UsersView:
    rows: tuple[UserRow, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupsView:
    rows: tuple[GroupRole, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrantsView:
    rows: tuple[Grant, ...]
    users: tuple[str, ...]
    groups: tuple[str, ...]
    deployments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WebhooksView:
    rows: tuple[Webhook, ...]
    events: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllowancesView:
    rows: tuple[EngineAllowance, ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuleRow:
    name: str
    title: str
    value: str
    tone: str
    actor: str
    changed_at: datetime | None


@dataclass(frozen=True, slots=True)
class OwnAccess:
    user: User
    role: Role | None
    groups: tuple[str, ...]
    grants: tuple[Grant, ...]


def own_access(caller: Caller) -> OwnAccess:
    user = User.objects.get(pk=caller.user.pk or 0)
    groups = tuple(user.groups.order_by("name").values_list("name", flat=True))
    grants = Grant.objects.filter(user=user) | Grant.objects.filter(group__user=user)
    return OwnAccess(user, caller.access.role, groups, tuple(grants.order_by("deployment").distinct()))


@dataclass(frozen=True, slots=True)
class FactorsView:
    """A user's own second factors, and the number of remaining recovery codes."""

    rows: tuple[SecondFactor, ...]
    recovery_codes: int


def factors_view(caller: Caller) -> FactorsView:
    rows = tuple(SecondFactor.objects.filter(user_id=caller.user.pk or 0))
    return FactorsView(rows, RecoveryCode.objects.filter(user_id=caller.user.pk or 0).count() if rows else 0)


def tokens_view(caller: Caller, now: datetime) -> TokensView:
    """Tokens that are not revoked, newest first, and the service accounts for which an admin may create one."""
    tokens = visible_tokens(caller.user, caller.access).filter(revoked_at=None).order_by("-id")[:SHOWN]
    names = service_accounts_described().values_list("user__username", flat=True) if caller.access.administer else ()
    return TokensView(tuple(TokenRow(token, token.state_at(now)) for token in tokens), tuple(names))


def session_rows(caller: Caller, now: datetime) -> tuple[tuple[LoginSession, bool], ...]:
    sessions = visible_sessions(caller.user, caller.access, now)[:SHOWN]
    return tuple((session, session.session_key == caller.session_key) for session in sessions)


def users_view() -> UsersView:
    groups = group_names()
    users = users_described().order_by("-is_active", "username")[:SHOWN]
    return UsersView(tuple(_user_row(user) for user in users), groups)


def service_accounts_view() -> UsersView:
    groups = group_names()
    accounts = service_accounts_described()[:SHOWN]
    return UsersView(tuple(_user_row(account.user, account) for account in accounts), groups)


def groups_view() -> GroupsView:
    groups = GroupRole.objects.select_related("group").annotate(members=Count("group__user"))[:SHOWN]
    return GroupsView(tuple(groups), tuple(value for value, _ in ROLES))


def grants_view() -> GrantsView:
    grants = Grant.objects.select_related("user", "group")[:SHOWN]
    users = User.objects.filter(is_active=True).order_by("username").values_list("username", flat=True)[:SHOWN]
    deployments = Deployment.objects.order_by("name").values_list("name", flat=True)[:SHOWN]
    return GrantsView(tuple(grants), tuple(users), group_names(), tuple(deployments))


def group_names() -> tuple[str, ...]:
    return tuple(Group.objects.filter(role__isnull=False).order_by("name").values_list("name", flat=True))


def pending_approvals(caller: Caller) -> tuple[tuple[Approval, bool, bool], ...]:
    """Pending approvals, each with whether the user requested it, and whether they may approve it."""
    own = caller.user.get_username()[:64]
    pending = Approval.objects.filter(state=ApprovalState.PENDING.value)[:SHOWN]
    return tuple((approval, approval.requested_by == own, caller.user.pk in approval.approvers) for approval in pending)


def past_approvals() -> tuple[Approval, ...]:
    return tuple(Approval.objects.exclude(state=ApprovalState.PENDING.value)[:50])


def approval_rules() -> tuple[RuleRow, ...]:
    rules = ApprovalRule.objects.in_bulk()
    return tuple(_approval_rule(action.name, action.title, rules.get(action.name)) for action in fleet_actions())


def fault_rules() -> tuple[RuleRow, ...]:
    rules = FaultRule.objects.in_bulk()
    return tuple(_fault_rule(rule, rules.get(rule.value)) for rule in SETTABLE_RULES)


def webhooks_view() -> WebhooksView:
    events = tuple(event.value for event in WebhookEvent if event is not WebhookEvent.TEST)
    return WebhooksView(tuple(Webhook.objects.order_by("name")[:SHOWN]), events)


def allowances_view() -> AllowancesView:
    return AllowancesView(tuple(EngineAllowance.objects.order_by("engine", "name")[:SHOWN]), ENGINES)


def deliveries() -> tuple[WebhookDelivery, ...]:
    return tuple(WebhookDelivery.objects.filter(webhook__isnull=False).select_related("webhook").order_by("-id")[:20])


def _user_row(user: User, account: ServiceAccount | None = None) -> UserRow:
    groups = tuple(sorted(group.name for group in user.groups.all()))
    return UserRow(user, role_by_groups(user), groups, account)


def _approval_rule(name: str, title: str, rule: ApprovalRule | None) -> RuleRow:
    required = rule is not None and rule.required
    actor, at = (rule.actor, rule.changed_at) if rule else ("", None)
    return RuleRow(name, title, "required" if required else "not required", "ok" if required else "idle", actor, at)


def _fault_rule(rule: Rule, row: FaultRule | None) -> RuleRow:
    mode = RuleMode(row.mode) if row else RuleMode.ON
    tone = {RuleMode.ON: "ok", RuleMode.SHADOW: "warn", RuleMode.OFF: "idle"}[mode]
    actor, at = (row.actor, row.changed_at) if row else ("", None)
    return RuleRow(rule.value, rule.value.replace("_", " ").capitalize(), mode.value, tone, actor, at)
