"""Makes sure that the operator can get in: a superuser with the given password, and one API token in a file.

Repeating it changes nothing while both still work: an unchanged password keeps sessions alive, a valid token stays.
"""

import os
from datetime import datetime
from pathlib import Path

from django.contrib.auth.models import User
from django.db import transaction

from accounts.models import ApiToken
from accounts.selectors import token_by_text
from accounts.services.token import token_create, token_revoke

OPERATOR = "operator"
TOKEN_NAME = "operator-token"  # noqa: S105 - the name of a token, not a secret


def operator_ensure(*, password: str, token_file: Path, now: datetime) -> tuple[User, bool]:
    """The operator, and whether a new token was written to `token_file` (mode 0600).

    Raises:
        OSError: the file cannot be written; then no token was created either.
    """
    with transaction.atomic():
        user = _user(password)
        if _opens(token_file, user, now):
            return user, False
        for old in ApiToken.objects.filter(user=user, name=TOKEN_NAME, revoked_at=None):
            token_revoke(token=old, actor=OPERATOR, now=now)
        _, text = token_create(user=user, name=TOKEN_NAME, now=now)
        _write(token_file, text)
    return user, True


def _user(password: str) -> User:
    user, _ = User.objects.select_for_update().get_or_create(username=OPERATOR)
    user.is_superuser = user.is_staff = user.is_active = True
    if not user.check_password(password):
        user.set_password(password)
    user.save()
    return user


def _opens(token_file: Path, user: User, now: datetime) -> bool:
    if not token_file.is_file():
        return False
    token = token_by_text(token_file.read_text(errors="replace").strip())
    return token is not None and token.user_id == user.pk and token.refusal(now) is None


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
