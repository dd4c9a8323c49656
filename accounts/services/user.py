"""Creates and changes users, service accounts and the first operator. Users are deactivated, never deleted, so records
keep their names.

An active admin always remains, and users cannot deactivate themselves."""

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from django.contrib.auth.models import Group, User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import connection, transaction

from accounts.models import ApiToken, GroupRole, ServiceAccount, name_refusal
from accounts.selectors import admins, token_by_text
from accounts.services.approval import approvals_withdraw
from accounts.services.session import sessions_end
from accounts.services.token import token_create, token_revoke, tokens_revoke
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

_ADMINS_LOCK = 0x5357_0025
"""Advisory lock of this database; any number that no other lock uses."""
OPERATOR = "operator"
TOKEN_NAME = "operator-token"  # noqa: S105 - the name of a token, not a secret


class HashedPassword(str):
    """A password that was validated and hashed at the time of the request."""


@transaction.atomic
def user_create(
    *, username: str, actor: str, now: datetime, password: str = "", email: str = "", groups: Iterable[str] = ()
) -> User:
    """Create a user who logs in with a password, or without one by the identity provider only. Raises InvalidInput for
    an invalid name, a weak password, or an unknown group. Raises Conflict if the name is taken."""
    user = _new_user(username, email, groups)
    _set_password(user, password)
    event_record(kind="user.created", message=f"user {username} created by {actor}", now=now, actor=actor)
    return user


@transaction.atomic
def service_account_create(
    *, name: str, actor: str, now: datetime, description: str = "", groups: Iterable[str] = ()
) -> ServiceAccount:
    """Create a service account; create its token next. Raises InvalidInput for an invalid name, or an unknown group.
    Raises Conflict if the name is taken, by a person or a program."""
    user = _new_user(name, "", groups)
    _set_password(user, "")
    account = ServiceAccount.objects.create(user=user, description=description, created_by=actor, created_at=now)
    event_record(
        kind="service_account.created", message=f"service account {name} created by {actor}", now=now, actor=actor
    )
    return account


def user_change(
    *,
    username: str,
    actor: str,
    now: datetime,
    active: bool | None = None,
    password: str | None = None,
    email: str | None = None,
    groups: Iterable[str] | None = None,
    description: str | None = None,
) -> User:
    """Change the given fields. A new password or a deactivation ends the user's sessions and tokens; a deactivation
    also withdraws the user's pending requests. Raises InvalidInput for a weak password, a password for a program, or an
    unknown group. Raises Conflict if no admin would be left, or it would deactivate the caller."""
    with transaction.atomic():
        user = User.objects.select_for_update().get(username=username)
        changed = _change(user, active, email, groups, description)
        if password is not None:
            changed.append("password")
            if ServiceAccount.objects.filter(user=user).exists():
                raise InvalidInput(field="password", rule="person", message="a service account has tokens, no password")
            _set_password(user, password)
        if active is False and username == actor:
            raise Conflict("you cannot deactivate yourself; ask another admin")
        if {"deactivated", "groups"} & set(changed):
            require_an_admin()
        if "deactivated" in changed:
            why = f"{username} was deactivated"
            approvals_withdraw(requester=username, actor=actor, now=now, why=why)
        if "password" in changed or active is False:
            sessions_end(user=user, actor=actor, now=now)
            tokens_revoke(user=user, actor=actor, now=now)
        if changed:
            what = ", ".join(changed)
            message = f"user {username} changed by {actor}: {what}"
            event_record(kind="user.changed", message=message, now=now, actor=actor, tone=Tone.IDLE)
    return user


@transaction.atomic
def password_change(*, user: User, new: str, now: datetime) -> None:
    """Change a user's own password and end all the user's sessions and tokens. Raises InvalidInput if the new password
    is empty or weak."""
    if not new:
        raise InvalidInput(field="new", rule="required", message="the new password is empty")
    _set_password(user, new)
    actor = user.get_username()[:64]
    sessions_end(user=user, actor=actor, now=now)
    tokens_revoke(user=user, actor=actor, now=now)
    event_record(kind="user.changed", message=f"user {actor} changed their password", now=now, actor=actor)


def groups_named(names: Iterable[str]) -> list[Group]:
    """Returns the groups of these names. Raises InvalidInput if one does not exist, or has no role."""
    wanted = sorted(set(names))
    groups = list(Group.objects.filter(name__in=wanted, role__isnull=False).order_by("name"))
    missing = sorted(set(wanted) - {group.name for group in groups})
    if missing:
        known = ", ".join(GroupRole.objects.values_list("group__name", flat=True)) or "none"
        message = f"there is no group {missing[0]!r}; there are: {known}"
        raise InvalidInput(field="groups", rule="exists", message=message)
    return groups


def _change(
    user: User, active: bool | None, email: str | None, groups: Iterable[str] | None, description: str | None
) -> list[str]:
    changed = []
    if active is not None and active != user.is_active:
        user.is_active = active
        changed.append("active" if active else "deactivated")
    if email is not None and email != user.email:
        user.email = email
        changed.append("email")
    user.save(update_fields=["is_active", "email"])
    if groups is not None:
        user.groups.set(groups_named(groups))
        changed.append("groups")
    if description is not None:
        ServiceAccount.objects.filter(user=user).update(description=description)
        changed.append("description")
    return changed


def _new_user(username: str, email: str, groups: Iterable[str]) -> User:
    if refusal := name_refusal(username):
        raise InvalidInput(field="username", rule="name", message=refusal)
    if User.objects.filter(username__iexact=username).exists():
        raise Conflict(f"there is a user {username} already; choose another name")
    user = User.objects.create(username=username, email=email)
    user.groups.set(groups_named(groups))
    return user


def password_check(password: str, user: User) -> None:
    """Raises InvalidInput for a weak password."""
    try:
        validate_password(password, user)
    except ValidationError as weak:
        raise InvalidInput(field="password", rule="strong", message=" ".join(weak.messages)) from None


def _set_password(user: User, password: str) -> None:
    if not password:
        user.set_unusable_password()
    elif isinstance(password, HashedPassword):
        user.password = str(password)
    else:
        password_check(password, user)
        user.set_password(password)
    user.save(update_fields=["password"])


def require_an_admin() -> None:
    """Refuse a change that leaves no admin who is a person. Raises Conflict, which rolls the whole change back."""
    with connection.cursor() as cursor:  # without it two admins could remove each other at the same time
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_ADMINS_LOCK])
    admin_users = User.objects.filter(admins(), service_account__isnull=True)
    if not admin_users.exists():
        raise Conflict("no admin would be left; make another admin first")


def operator_ensure(*, password: str, token_file: Path, now: datetime) -> tuple[User, bool]:
    """Make sure that the operator can log in: a superuser with this password, and one API token in a file.

    Repeating it changes nothing while both work: an unchanged password keeps sessions, and a valid token stays. Returns
    the operator, and whether a new token was written to `token_file` (mode 0600). Raises OSError if the file cannot be
    written; then no token was created either."""
    with transaction.atomic():
        user = _operator_user(password, now)
        if _token_works(token_file, user, now):
            return user, False
        for old in ApiToken.objects.filter(user=user, name=TOKEN_NAME, revoked_at=None):
            token_revoke(token=old, actor=OPERATOR, now=now)
        _, text = token_create(user=user, name=TOKEN_NAME, now=now)
        _write_private(token_file, text)
    return user, True


def _operator_user(password: str, now: datetime) -> User:
    user, _ = User.objects.select_for_update().get_or_create(username=OPERATOR)
    user.is_superuser = user.is_staff = user.is_active = True
    if not user.check_password(password):
        user.set_password(password)
        sessions_end(user=user, actor=OPERATOR, now=now)
        tokens_revoke(user=user, actor=OPERATOR, now=now)
    user.save()
    return user


def _token_works(token_file: Path, user: User, now: datetime) -> bool:
    if not token_file.is_file():
        return False
    token = token_by_text(token_file.read_text(errors="replace").strip())
    return token is not None and token.user_id == user.pk and token.refusal(now) is None


def _write_private(path: Path, text: str) -> None:
    """Write the file atomically, and never readable by other accounts."""
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
