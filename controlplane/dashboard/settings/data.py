"""Reads what the settings show: users, roles and credentials, approvals, webhooks and rules."""

from dataclasses import dataclass, replace
from datetime import datetime

from django.contrib.auth.models import Group, User
from django.db.models import Count, Q, QuerySet

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
from controlplane.dashboard.fragments import Caller, PageRequest
from controlplane.dashboard.lists import Column, List, ListPage
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


def _users(request: PageRequest) -> "QuerySet[User]":
    return users_described().filter(username__icontains=request.text("users-q"))


def _service_accounts(request: PageRequest) -> "QuerySet[ServiceAccount]":
    text = request.text("accounts-q")
    named = Q(user__username__icontains=text) | Q(description__icontains=text)
    return service_accounts_described().filter(named)


def _groups(request: PageRequest) -> "QuerySet[GroupRole]":
    groups = GroupRole.objects.select_related("group").annotate(members=Count("group__user"))
    return groups.filter(group__name__icontains=request.text("groups-q"))


def _deliveries(request: PageRequest) -> "QuerySet[WebhookDelivery]":
    """Without the messages of tenants."""
    text, sent = request.text("deliveries-q"), WebhookDelivery.objects.filter(webhook__isnull=False)
    return sent.filter(Q(webhook__name__icontains=text) | Q(event__icontains=text)).select_related("webhook")


ROLE_AND_GROUPS: tuple[Column[UserRow], ...] = (
    Column("role", "Role", lambda row: row.role),
    Column("groups", "Groups", lambda row: ", ".join(row.groups)),
)
USER_LIST: List[UserRow] = List(
    name="users",
    prefix="users-",
    columns=(
        Column("name", "Name", lambda row: row.user.get_username(), ("username",)),
        Column("active", "Active", lambda row: row.user.is_active, ("is_active",), is_newest_first=True),
        *ROLE_AND_GROUPS,
        Column("factor", "Second factor", lambda row: getattr(row.user, "has_factor", None), ("has_factor",)),
        Column("login", "Last login", lambda row: row.user.last_login, ("last_login",), is_newest_first=True),
    ),
    query=_users,
    rows=lambda users, now: [_user_row(user) for user in users],
    order=("-is_active", "username"),
    filters=("users-q",),
)
SERVICE_ACCOUNT_LIST: List[UserRow] = List(
    name="service-accounts",
    prefix="accounts-",
    columns=(
        Column("name", "Name", lambda row: row.user.get_username(), ("user__username",)),
        Column("active", "Active", lambda row: row.user.is_active, ("user__is_active",), is_newest_first=True),
        *ROLE_AND_GROUPS,
        Column("description", "Description", lambda row: row.account.description if row.account else ""),
    ),
    query=_service_accounts,
    rows=lambda accounts, now: [_user_row(account.user, account) for account in accounts],
    order=("user__username",),
    filters=("accounts-q",),
)
GROUP_LIST: List[GroupRole] = List(
    name="groups",
    prefix="groups-",
    columns=(
        Column("name", "Name", lambda row: row.group.name, ("group__name",)),
        Column("role", "Role", lambda row: row.role, ("role",)),
        Column("members", "Members", lambda row: getattr(row, "members", None), ("members",), is_newest_first=True),
        Column("claim", "Group claim", lambda row: row.claim, ("claim",)),
    ),
    query=_groups,
    rows=lambda groups, now: groups,
    order=("group__name",),
    filters=("groups-q",),
)
DELIVERY_LIST: List[WebhookDelivery] = List(
    name="deliveries",
    prefix="deliveries-",
    columns=(
        Column("webhook", "Webhook", lambda row: row.webhook.name if row.webhook else "", ("webhook__name",)),
        Column("state", "State", lambda row: row.state, ("state",)),
        Column("event", "Event", lambda row: row.event, ("event",)),
        Column("attempts", "Attempts", lambda row: row.attempts, ("attempts",), "number wide", is_newest_first=True),
        Column("response", "Response", lambda row: f"{row.status or ''} {row.reason}".strip(), ("status",), "wide"),
        Column("when", "When", lambda row: row.created_at, ("created_at",), "number", is_newest_first=True),
    ),
    query=_deliveries,
    rows=lambda deliveries, now: deliveries,
    order=("-id",),
    filters=("deliveries-q",),
)


def users_page(request: PageRequest) -> ListPage[UserRow]:
    return replace(USER_LIST.page(request), above=group_names())


def service_accounts_page(request: PageRequest) -> ListPage[UserRow]:
    return replace(SERVICE_ACCOUNT_LIST.page(request), above=group_names())


def groups_page(request: PageRequest) -> ListPage[GroupRole]:
    return replace(GROUP_LIST.page(request), above=tuple(value for value, _ in ROLES))


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
