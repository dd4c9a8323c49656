"""Reads accounts: tokens by what a caller presents, what a user may do, and what of all that a caller may see."""

from datetime import datetime

from django.contrib.auth.models import User
from django.db.models import Q, QuerySet

from accounts.models import ApiToken, Grant, GroupRole, LoginSession, ServiceAccount
from kernel.access import Access, Known, Role, Scope
from kernel.secrets import secret_matches, secret_prefix


def token_by_text(text: str) -> ApiToken | None:
    """The token with this text, its user loaded. It may be revoked or expired: ask `ApiToken.refusal`."""
    prefix = secret_prefix(text)
    if prefix is None:
        return None
    token = ApiToken.objects.select_related("user").filter(prefix=prefix).first()
    return token if token is not None and secret_matches(text, token.digest) else None


def access_of_user(user: Known, scope: Scope) -> Access:
    """What a user may do (settings.ACCESS_SOURCE): without a group that gives more, a user is a viewer."""
    if not isinstance(user, User) or not user.is_active:
        return Access()
    if user.is_superuser:
        return Access(role=Role.ADMIN, scope=scope)
    groups = list(GroupRole.objects.filter(group__user=user).values_list("role", flat=True))
    roles = [Role.VIEWER, *(Role(role) for role in groups)]
    return Access(role=max(roles, key=lambda role: role.rank), grants=_grants(user), scope=scope)


def _grants(user: User) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    mine = Grant.objects.filter(Q(user=user) | Q(group__user=user)).values_list("deployment", "role")
    for deployment, role in mine:
        roles[deployment] = max(roles.get(deployment, Role.VIEWER), Role(role), key=lambda each: each.rank)
    return roles


def role_by_groups(user: User) -> Role:
    """The role everywhere of one of `users_described`, without another query."""
    if user.is_superuser:
        return Role.ADMIN
    given = [Role(group.role.role) for group in user.groups.all() if hasattr(group, "role")]
    return max([Role.VIEWER, *given], key=lambda role: role.rank)


def users_described() -> QuerySet[User]:
    """People, with their groups and identities."""
    return User.objects.filter(service_account__isnull=True).prefetch_related("groups__role", "identities")


def service_accounts_described() -> QuerySet[ServiceAccount]:
    """Programs, with their groups."""
    return ServiceAccount.objects.select_related("user").prefetch_related("user__groups__role")


def visible_tokens(user: Known, access: Access) -> QuerySet[ApiToken]:
    """A user's own tokens; everybody's for admins."""
    tokens = ApiToken.objects.select_related("user")
    return tokens if access.administer else tokens.filter(user_id=user.pk or 0)


def visible_sessions(user: Known, access: Access, now: datetime) -> QuerySet[LoginSession]:
    """A user's own logins that still hold; everybody's for admins."""
    sessions = LoginSession.objects.select_related("user").filter(expires_at__gt=now)
    return sessions if access.administer else sessions.filter(user_id=user.pk or 0)
