"""API tokens, roles of groups, grants, service accounts, identities at providers, logins, second factors, and requests
for two-person approval. Secrets are shown once and stored as hashes, or encrypted if they have to be read again.

Names of users are ASCII, so that no two look the same; short enough for every column of actors, so that no two are cut
to the same; and never those that the fleet itself acts under."""

import re
from datetime import datetime
from enum import StrEnum

from django.conf import settings
from django.contrib.auth.models import Group
from django.db import models

from kernel.access import Role, Scope
from kernel.tones import Tone

NAME_LONGEST = 64
"""Of every column that names an actor."""
NAME_FORM = re.compile(rf"[A-Za-z0-9][-A-Za-z0-9_.@+]{{0,{NAME_LONGEST - 1}}}")
NAME_RULE = f"1 to {NAME_LONGEST} letters, digits and -_.@+ of ASCII, the first a letter or digit"
NAME_RESERVED = frozenset({"anonymous", "autopilot", "reconciler", "root", "switchyard", "system"})
"""Names in timelines and audit records for the fleet itself, the host's owner and anonymous callers."""


def name_refusal(name: str) -> str:
    """Returns why this cannot be a user name, or ""."""
    if NAME_FORM.fullmatch(name) is None:
        return f"{name!r} cannot be a user name: {NAME_RULE}"
    if name.casefold() in NAME_RESERVED:
        return f"{name!r} is reserved: records would attribute this user's actions to the fleet itself"
    return ""


class ApprovalState(StrEnum):
    """Pending until decided or expired. Failed: approved, but its action failed."""

    PENDING = "pending"
    DONE = "done"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    FAILED = "failed"


APPROVAL_TONE = {
    ApprovalState.PENDING: Tone.MOVING,
    ApprovalState.DONE: Tone.OK,
    ApprovalState.REJECTED: Tone.IDLE,
    ApprovalState.WITHDRAWN: Tone.IDLE,
    ApprovalState.EXPIRED: Tone.WARN,
    ApprovalState.FAILED: Tone.BAD,
}
APPROVAL_STATES = [(state.value, state.value.capitalize()) for state in ApprovalState]


class TokenState(StrEnum):
    """Only active tokens are accepted."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def tone(self) -> Tone:
        return {TokenState.ACTIVE: Tone.OK, TokenState.EXPIRED: Tone.IDLE, TokenState.REVOKED: Tone.IDLE}[self]


TOKEN_STATES = [(state.value, state.value.capitalize()) for state in TokenState]


class FactorKind(StrEnum):
    """Kinds of second factors: an app that shows codes, or a key or passkey that signs."""

    APP = "app"
    KEY = "key"

    @property
    def described(self) -> str:
        return {FactorKind.APP: "authenticator app", FactorKind.KEY: "security key"}[self]


FACTOR_KINDS = [(kind.value, kind.described.capitalize()) for kind in FactorKind]


ROLES = [(role.value, role.value) for role in Role]
SCOPES = [(scope.value, scope.value) for scope in Scope]


class GroupRole(models.Model):
    """The role of a group's members. `claim`: the group at the identity provider whose members join this one."""

    group = models.OneToOneField(Group, on_delete=models.CASCADE, primary_key=True, related_name="role")
    role = models.CharField(max_length=16, choices=ROLES)
    claim = models.CharField(max_length=256, blank=True)

    class Meta:
        ordering = ["group__name"]

    def __str__(self) -> str:
        return f"{self.group.name}: {self.role}"


class Grant(models.Model):
    """A role for one deployment, granted to a user or to the members of a group."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, null=True, related_name="grants")
    group = models.ForeignKey(Group, on_delete=models.CASCADE, null=True, related_name="grants")
    deployment = models.CharField(max_length=96)
    role = models.CharField(max_length=16, choices=ROLES)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["deployment", "id"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(user__isnull=True) ^ models.Q(group__isnull=True), name="grant_to_one"
            ),
            models.UniqueConstraint(fields=["user", "deployment"], name="grant_once_a_user"),
            models.UniqueConstraint(fields=["group", "deployment"], name="grant_once_a_group"),
        ]

    def __str__(self) -> str:
        return f"{self.role} of {self.deployment} for {self.user or self.group}"


class ServiceAccount(models.Model):
    """A user that is a program. It has tokens and no password."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, primary_key=True, related_name="service_account"
    )
    description = models.CharField(max_length=200, blank=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["user__username"]

    def __str__(self) -> str:
        return self.user.get_username()


class Identity(models.Model):
    """A user's identity at an identity provider. Names there may be reused; `subject` is permanent."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="identities")
    issuer = models.CharField(max_length=255)
    subject = models.CharField(max_length=255)
    created_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["issuer", "subject"], name="identity_once")]

    def __str__(self) -> str:
        return f"{self.user} at {self.issuer}"


class IdentityProvider(models.Model):
    """The OpenID provider that an admin has set: at most one row. `sealed_secret`: the client's secret, encrypted for
    this issuer and client (accounts.services.identity_provider). `tenants`: group at the provider -> tenant whose page
    its members see."""

    issuer = models.CharField(
        max_length=255, blank=True, help_text="The provider exactly as it names itself. Empty: no such login."
    )
    client_id = models.CharField(max_length=255, default="switchyard", help_text="Switchyard's client at the provider.")
    sealed_secret = models.TextField(blank=True)
    title = models.CharField(max_length=64, default="single sign-on", help_text="Its name on the login page.")
    scopes = models.CharField(
        max_length=255, default="openid profile email", help_text="Scopes to request; some providers need `groups`."
    )
    groups_claim = models.CharField(max_length=64, default="groups", help_text="Claim that lists a user's groups.")
    admit_all = models.BooleanField(
        default=False, help_text="Users in no mapped group are viewers; otherwise they are refused."
    )
    tenants = models.JSONField(
        default=dict,
        blank=True,
        help_text="Group at the provider: tenant whose page its members see, read-only and without the console.",
    )
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.issuer or "no identity provider"


class LoginSession(models.Model):
    """One login in one browser. `session_key` names Django's session and is a secret, which is never shown.
    `factor_at`: when a second factor was last shown in it."""

    session_key = models.CharField(max_length=40, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="logins")
    method = models.CharField(max_length=16)
    address = models.CharField(max_length=64, blank=True)
    browser = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    factor_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.user} from {self.address}"


class SecondFactor(models.Model):
    """A user's second factor. `secret`: of an app, encrypted (accounts.one_time_codes); `credential`: id and public key
    of a security key. `last_count`: the time step of the last code, or the key's counter; the next one must be greater.
    `wrong_in_a_row`: wrong codes since the last right one."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="second_factors")
    kind = models.CharField(max_length=16, choices=FACTOR_KINDS)
    name = models.CharField(max_length=64)
    secret = models.TextField(blank=True)
    credential = models.TextField(blank=True)
    last_count = models.BigIntegerField(default=0)
    wrong_in_a_row = models.IntegerField(default=0)
    created_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{FactorKind(self.kind).described} {self.name!r} of {self.user.get_username()}"


class RecoveryCode(models.Model):
    """Replaces a lost second factor once; then its row is deleted."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="recovery_codes")
    digest = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "digest"], name="recovery_code_once")]

    def __str__(self) -> str:
        return f"a recovery code of {self.user.get_username()}"


class KeyChallenge(models.Model):
    """A challenge that a security key signs once; then its row is deleted. `ceremony`: enrolment or login."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    challenge = models.CharField(max_length=64, unique=True)
    ceremony = models.CharField(max_length=8)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.ceremony} for {self.user.get_username()}"


class ApiToken(models.Model):
    """A bearer token of the REST API, with the rights of its user within its scope. `made_with`: the token that created
    it; both are revoked together."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    name = models.CharField(max_length=96)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    scope = models.CharField(max_length=8, choices=SCOPES, default=Scope.ADMIN.value)
    created_by = models.CharField(max_length=64, blank=True)
    made_with = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="made")
    created_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    def state_at(self, now: datetime) -> TokenState:
        if self.revoked_at is not None:
            return TokenState.REVOKED
        return TokenState.EXPIRED if self.expires_at is not None and self.expires_at <= now else TokenState.ACTIVE

    def refusal(self, now: datetime) -> str | None:
        """Returns why this token is no longer accepted, or None."""
        if self.revoked_at is not None:
            return f"API token {self.name!r} was revoked at {self.revoked_at:%Y-%m-%d %H:%M} UTC; create another one"
        if self.expires_at is not None and self.expires_at <= now:
            return f"API token {self.name!r} expired at {self.expires_at:%Y-%m-%d %H:%M} UTC; create another one"
        if not self.user.is_active:
            return f"the user of API token {self.name!r} is deactivated"
        return None


class LoginFailure(models.Model):
    """A login attempt that has not succeeded. `subject` is a digest of the name or address that it counts against
    (accounts.services.login), because people type passwords into the wrong field."""

    subject = models.CharField(max_length=64)
    at = models.DateTimeField(db_index=True)

    class Meta:
        indexes = [models.Index(fields=["subject", "at"], name="login_failure_subject")]

    def __str__(self) -> str:
        return f"{self.subject[:8]}… at {self.at:%H:%M:%S}"


class Approval(models.Model):
    """A request that a second person must approve. `arguments` and `secrets` are the arguments of its action; secrets
    are never shown. `approvers`: primary keys of the users who could approve it at the time of the request; later
    admins cannot. `outcome`: a sentence, once it is decided."""

    action = models.CharField(max_length=48)
    summary = models.TextField()
    arguments = models.JSONField(default=dict, blank=True)
    secrets = models.JSONField(default=dict, blank=True)
    approvers = models.JSONField(default=list, blank=True)
    deployment = models.CharField(max_length=128, blank=True)
    region = models.CharField(max_length=64, blank=True)
    why = models.CharField(max_length=200, blank=True)
    state = models.CharField(max_length=16, choices=APPROVAL_STATES, default=ApprovalState.PENDING.value)
    requested_by = models.CharField(max_length=64)
    requested_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    decided_by = models.CharField(max_length=64, blank=True)
    decided_at = models.DateTimeField(null=True)
    outcome = models.TextField(blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.action}: {self.summary}"

    @property
    def tone(self) -> Tone:
        return APPROVAL_TONE[ApprovalState(self.state)]


class ApprovalRule(models.Model):
    """Whether an action on the whole fleet needs two-person approval. Actions without a row need none."""

    action = models.CharField(max_length=48, primary_key=True)
    required = models.BooleanField()
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["action"]

    def __str__(self) -> str:
        return f"{self.action}: {'two-person approval' if self.required else 'one person'}"
