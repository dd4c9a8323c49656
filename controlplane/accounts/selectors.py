"""Finds API tokens by what a caller presents, and what a user may do. The hash proves a token; groups and grants say
the rest."""

from django.contrib.auth.models import User
from django.db.models import Q

from controlplane.accounts.models import ApiToken, Grant, GroupRole
from controlplane.kernel.access import Access, Known, Role, Scope
from controlplane.kernel.secrets import secret_matches, secret_prefix


def token_by_text(text: str) -> ApiToken | None:
    """The token with this text, its user loaded. It may be revoked or expired: ask `ApiToken.refusal`."""
    prefix = secret_prefix(text)
    if prefix is None:
        return None
    token = ApiToken.objects.select_related("user").filter(prefix=prefix).first()
    return token if token is not None and secret_matches(text, token.digest) else None


def access_of_user(user: Known, scope: Scope) -> Access:
    """What a user may do (settings.ACCESS_SOURCE): who is in no group that says more may look."""
    if not isinstance(user, User) or not user.is_active:
        return Access()
    if user.is_superuser:
        return Access(role=Role.ADMIN, scope=scope)
    groups = list(GroupRole.objects.filter(group__user=user).values_list("role", flat=True))
    roles = [Role.VIEWER, *(Role(role) for role in groups)]
    return Access(role=max(roles, key=lambda role: role.rank), grants=_grants(user), scope=scope)


def _grants(user: User) -> dict[str, Role]:
    found: dict[str, Role] = {}
    mine = Grant.objects.filter(Q(user=user) | Q(group__user=user)).values_list("deployment", "role")
    for deployment, role in mine:
        found[deployment] = max(found.get(deployment, Role.VIEWER), Role(role), key=lambda each: each.rank)
    return found
