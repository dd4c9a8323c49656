"""Creates and revokes API tokens, each with its event. The secret itself is returned once and never stored."""

from datetime import datetime

from django.contrib.auth.models import User
from django.db import transaction

from controlplane.accounts.models import ApiToken
from controlplane.kernel.events import event_record
from controlplane.kernel.secrets import secret_issue


@transaction.atomic
def token_create(*, user: User, name: str, now: datetime, expires_at: datetime | None = None) -> tuple[ApiToken, str]:
    """A new token and its text, which nobody can ever read again."""
    issued = secret_issue()
    token = ApiToken.objects.create(
        prefix=issued.prefix, digest=issued.digest, name=name, user=user, created_at=now, expires_at=expires_at
    )
    event_record(
        kind="token.created",
        message=f"API token {name!r} ({issued.prefix}…) created for {user.get_username()}",
        now=now,
        actor=user.get_username(),
    )
    return token, issued.text


@transaction.atomic
def token_revoke(*, token: ApiToken, actor: str, now: datetime) -> bool:
    """Refuse a token from now on. Returns False if it was revoked already."""
    if ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=now) == 0:
        return False
    token.revoked_at = now
    event_record(
        kind="token.revoked", message=f"API token {token.name!r} ({token.prefix}…) revoked", now=now, actor=actor
    )
    return True
