"""Creates and revokes API tokens, each with its event. The secret is returned once and never stored. Tokens
that were created with a token are revoked with it."""

from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction

from accounts.models import ApiToken
from kernel.access import Scope
from kernel.events import event_record
from kernel.refusals import InvalidInput
from kernel.secrets import secret_row_create

DAYS, LONGEST_DAYS = 90, 366
"""Default and maximum lifetime of tokens."""
USED_EVERY_S = 60.0
"""Precision of `last_used_at`; a finer one would write a row at every request."""


@transaction.atomic
def token_create(
    *,
    user: User,
    name: str,
    now: datetime,
    expires_at: datetime | None = None,
    scope: Scope = Scope.ADMIN,
    actor: str = "",
    made_with: ApiToken | None = None,
) -> tuple[ApiToken, str]:
    """A new token and its text, which is not stored."""
    actor = actor or user.get_username()[:64]
    token, text = secret_row_create(
        ApiToken,
        name=name,
        user=user,
        scope=scope.value,
        created_by=actor,
        made_with=made_with,
        created_at=now,
        expires_at=expires_at,
    )
    event_record(
        kind="token.created",
        message=f"API token {name!r} ({token.prefix}…) created for {user.get_username()}, scope {scope}",
        now=now,
        actor=actor,
    )
    return token, text


def token_create_within(
    *, user: User, name: str, days: int, scope: Scope, shown: ApiToken | None, actor: str, now: datetime
) -> tuple[ApiToken, str]:
    """Create a token for `days`. If it was requested with a token (`shown`), that limits its scope and lifetime. Raises
    InvalidInput for a wider scope or a longer lifetime than the requesting token."""
    if not 1 <= days <= LONGEST_DAYS:
        message = f"a token lasts 1 to {LONGEST_DAYS} days, and not {days}"
        raise InvalidInput(field="expires_in_days", rule="range", message=message)
    expires_at = now + timedelta(days=days)
    if shown is not None and not Scope(shown.scope).cap.covers(scope.cap):
        message = f"a token of scope {shown.scope} cannot make one of scope {scope}"
        raise InvalidInput(field="scope", rule="within", message=message)
    if shown is not None and shown.expires_at is not None:
        expires_at = min(expires_at, shown.expires_at)
    return token_create(user=user, name=name, now=now, expires_at=expires_at, scope=scope, actor=actor, made_with=shown)


def token_used(*, token: ApiToken, now: datetime) -> None:
    """Record the use of a token, at most once per `USED_EVERY_S`."""
    if token.last_used_at is None or (now - token.last_used_at).total_seconds() >= USED_EVERY_S:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)


@transaction.atomic
def token_revoke(*, token: ApiToken, actor: str, now: datetime) -> bool:
    """Revoke a token and all that were created with it. Returns False if it was revoked already."""
    if ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=now) == 0:
        return False
    token.revoked_at = now
    event_record(
        kind="token.revoked", message=f"API token {token.name!r} ({token.prefix}…) revoked", now=now, actor=actor
    )
    for made in ApiToken.objects.filter(made_with=token):
        token_revoke(token=made, actor=actor, now=now)
    return True


@transaction.atomic
def tokens_revoke(*, user: User, actor: str, now: datetime) -> int:
    """Revoke all tokens of a user. Returns how many."""
    tokens = list(ApiToken.objects.filter(user=user, revoked_at=None))
    return sum(token_revoke(token=token, actor=actor, now=now) for token in tokens)
