"""Reads what the settings show of users, groups, second factors and deliveries."""

from dataclasses import dataclass

from django.contrib.auth.models import Group, User
from django.db.models import Count, QuerySet

from accounts.models import (
    ROLES,
    Grant,
    GroupRole,
    RecoveryCode,
    SecondFactor,
    ServiceAccount,
)
from accounts.selectors import (
    role_by_groups,
    service_accounts_described,
    users_described,
)
from controlplane.dashboard.fragments import Caller, PageRequest
from controlplane.dashboard.lists import Column, List
from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.planner import DeliveryState
from kernel.access import Role


@dataclass(frozen=True, slots=True)
class UserRow:
    user: User
    role: Role
    groups: tuple[str, ...]
    account: ServiceAccount | None = None


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


def _deliveries(request: PageRequest) -> "QuerySet[WebhookDelivery]":
    """Without the messages of tenants."""
    return WebhookDelivery.objects.filter(webhook__isnull=False).select_related("webhook")


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
    query=lambda request: users_described(),
    rows=lambda users, now: [_user_row(user) for user in users],
    order=("-is_active", "username"),
    find=("username",),
    above=lambda request: group_names(),
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
    query=lambda request: service_accounts_described(),
    rows=lambda accounts, now: [_user_row(account.user, account) for account in accounts],
    order=("user__username",),
    find=("user__username", "description"),
    above=lambda request: group_names(),
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
    query=lambda request: GroupRole.objects.select_related("group").annotate(members=Count("group__user")),
    order=("group__name",),
    find=("group__name",),
    above=lambda request: tuple(value for value, _ in ROLES),
)
DELIVERY_LIST: List[WebhookDelivery] = List(
    name="deliveries",
    prefix="deliveries-",
    columns=(
        Column("webhook", "Webhook", lambda row: row.webhook.name if row.webhook else "", ("webhook__name",)),
        Column("state", "State", lambda row: row.state, ("state",), choices=tuple(DeliveryState)),
        Column("event", "Event", lambda row: row.event, ("event",)),
        Column("attempts", "Attempts", lambda row: row.attempts, ("attempts",), "number wide", is_newest_first=True),
        Column("response", "Response", lambda row: f"{row.status or ''} {row.reason}".strip(), ("status",), "wide"),
        Column("when", "When", lambda row: row.created_at, ("created_at",), "number", is_newest_first=True),
    ),
    query=_deliveries,
    order=("-id",),
    find=("webhook__name", "event"),
)


def group_names() -> tuple[str, ...]:
    return tuple(Group.objects.filter(role__isnull=False).order_by("name").values_list("name", flat=True))


def _user_row(user: User, account: ServiceAccount | None = None) -> UserRow:
    groups = tuple(sorted(group.name for group in user.groups.all()))
    return UserRow(user, role_by_groups(user), groups, account)
