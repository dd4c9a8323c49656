"""Reads accounts: tokens by their text, the access of users, and the accounts that a caller may see."""

from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.contrib.auth.models import User
from django.db.models import Exists, OuterRef, Q, QuerySet

from accounts.models import ApiToken, Grant, GroupRole, IdentityProvider, LoginSession, SecondFactor, ServiceAccount
from kernel.access import Access, Known, Role, Scope
from kernel.secrets import secret_matches, secret_prefix


def token_by_text(text: str) -> ApiToken | None:
    """Returns the token with this text and its user. It may be revoked or expired: check `ApiToken.refusal`."""
    prefix = secret_prefix(text)
    if prefix is None:
        return None
    token = ApiToken.objects.select_related("user").filter(prefix=prefix).first()
    return token if token is not None and secret_matches(text, token.digest) else None


def access_of_user(user: Known, scope: Scope) -> Access:
    """Returns a user's access (settings.ACCESS_SOURCE). A user without groups is a viewer."""
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


def admins() -> Q:
    """Condition for active users who are admins by a group or as superuser."""
    return Q(is_active=True) & (Q(is_superuser=True) | Q(groups__role__role=Role.ADMIN.value))


def second_persons(requester: str) -> list[int]:
    """Returns who may approve this user's requests: admins who are people and did not create the requesting program."""
    people = User.objects.filter(admins(), service_account__isnull=True).distinct()
    makers = {
        *ServiceAccount.objects.filter(user__username=requester).values_list("created_by", flat=True),
        *ApiToken.objects.filter(user__username=requester, user__service_account__isnull=False).values_list(
            "created_by", flat=True
        ),
    }
    return sorted(user.pk for user in people if user.username != requester and user.username not in makers)


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """A right that could make a second person: an admin, the identity provider, a group of it whose members are admins,
    a password (its hash, as `secret`), or a login without second factor. `taken`: the right ends; grants of deployments
    count only then."""

    kind: str
    name: str
    secret: str = ""
    taken: bool = False

    @property
    def described(self) -> str:
        if self.taken:
            return {
                "admin": f"{self.name} is no longer an admin",
                "claim": f"members of {self.name} at the identity provider are no longer admins",
                "grant": f"{self.name} ends",
            }[self.kind]
        return {
            "admin": f"{self.name} becomes an admin",
            "claim": f"members of {self.name} at the identity provider become admins",
            "password": f"{self.name} gets a password",
            "provider": f"the identity provider becomes {self.name}",
            "factor": f"{self.name} logs in without a second factor",
        }[self.kind]


def rights_without_own_password(actor: str) -> frozenset[Right]:
    """Returns all rights except the actor's own password."""
    claims = GroupRole.objects.filter(role=Role.ADMIN.value).exclude(claim="").values_list("claim", flat=True)
    passwords = User.objects.exclude(username=actor).exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)
    known = IdentityProvider.objects.exclude(issuer="").values_list("issuer", "client_id", "groups_claim")
    return frozenset(
        {
            *(Right("provider", f"{issuer} ({client}, {claim})") for issuer, client, claim in known),
            *(Right("admin", name) for name in User.objects.filter(admins()).values_list("username", flat=True)),
            *(Right("claim", claim) for claim in claims),
            *(Right("password", name, text) for name, text in passwords.values_list("username", "password") if text),
        }
    )


def rights_of_other_people(actor: str) -> frozenset[Right]:
    """Returns the rights that no admin may remove alone: of other people who are admins by a group, a claim or a
    grant."""
    people = User.objects.filter(admins(), service_account__isnull=True).exclude(username=actor)
    claims = GroupRole.objects.filter(role=Role.ADMIN.value).exclude(claim="").values_list("claim", flat=True)
    grants = Grant.objects.filter(role=Role.ADMIN.value, user__service_account__isnull=True)
    return frozenset(
        {
            *(Right("admin", name, taken=True) for name in people.values_list("username", flat=True)),
            *(Right("claim", claim, taken=True) for claim in claims),
            *(Right("grant", str(grant), taken=True) for grant in grants.exclude(user__username=actor)),
        }
    )


def has_second_factor(user: Known) -> bool:
    return SecondFactor.objects.filter(user_id=user.pk or 0).exists()


def users_with_second_factor(but: str) -> frozenset[str]:
    users = User.objects.filter(second_factors__isnull=False).exclude(username=but)
    return frozenset(users.values_list("username", flat=True))


def role_by_groups(user: User) -> Role:
    """The role everywhere of one of `users_described`, without another query."""
    if user.is_superuser:
        return Role.ADMIN
    given = [Role(group.role.role) for group in user.groups.all() if hasattr(group, "role")]
    return max([Role.VIEWER, *given], key=lambda role: role.rank)


def users_described() -> QuerySet[User]:
    """People, with their groups and identities; `has_factor`: whether they have a second factor."""
    people = User.objects.filter(service_account__isnull=True)
    factors = SecondFactor.objects.filter(user=OuterRef("pk"))
    return people.annotate(has_factor=Exists(factors)).prefetch_related("groups__role", "identities")


def service_accounts_described() -> QuerySet[ServiceAccount]:
    return ServiceAccount.objects.select_related("user").prefetch_related("user__groups__role")


def visible_tokens(user: Known, access: Access) -> QuerySet[ApiToken]:
    """A user's own tokens; everybody's for admins."""
    tokens = ApiToken.objects.select_related("user")
    return tokens if access.administer else tokens.filter(user_id=user.pk or 0)


def visible_sessions(user: Known, access: Access, now: datetime) -> QuerySet[LoginSession]:
    """A user's own logins that still hold; everybody's for admins."""
    sessions = LoginSession.objects.select_related("user").filter(expires_at__gt=now)
    return sessions if access.administer else sessions.filter(user_id=user.pk or 0)
