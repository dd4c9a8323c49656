"""Slows down guessing of passwords: after `failures_allowed` wrong ones for a user name from an address, none is tried.
The count lives in PostgreSQL, so it holds over several web processes and restarts.

Lets in who an identity provider vouches for: finds or makes the user, and gives it the groups that its claims name.
Groups without a claim are given by hand and stay. A name that a local user has already is never taken over.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.contrib.auth.models import Group, User
from django.db import transaction

from accounts.models import Identity, LoginFailure
from accounts.oidc import Claims
from kernel.events import event_record
from kernel.refusals import Refusal

USERNAME = re.compile(r"[A-Za-z0-9][-\w.@+]{0,149}")


@dataclass(frozen=True, slots=True)
class LoginLimit:
    """Ten in five minutes is far above human mistyping and leaves a guesser under 3,000 tries a day."""

    failures_allowed: int = 10
    window_s: float = 300.0


LIMIT = LoginLimit()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who tries to log in, and from where."""

    username: str
    address: str

    @property
    def subject(self) -> str:
        """Digest under which failures are counted."""
        return hashlib.sha256(f"{self.username.casefold()}\0{self.address}".encode()).hexdigest()


def login_wait_s(*, attempt: Attempt, now: datetime, limit: LoginLimit = LIMIT) -> float:
    """Seconds until another attempt is heard; 0 if one may be made now."""
    since = now - timedelta(seconds=limit.window_s)
    failures = LoginFailure.objects.filter(subject=attempt.subject, at__gt=since).order_by("-at")
    newest = list(failures.values_list("at", flat=True)[: limit.failures_allowed])
    if len(newest) < limit.failures_allowed:
        return 0.0
    return (newest[-1] - since).total_seconds()


def login_failure_record(*, attempt: Attempt, now: datetime, limit: LoginLimit = LIMIT) -> None:
    """Count a wrong password, and forget those that no longer matter."""
    LoginFailure.objects.filter(at__lte=now - timedelta(seconds=limit.window_s)).delete()
    LoginFailure.objects.create(subject=attempt.subject, at=now)


def login_failures_forget(*, attempt: Attempt) -> None:
    """After a good login."""
    LoginFailure.objects.filter(subject=attempt.subject).delete()


class NotAdmitted(Refusal):
    """The provider knows them; Switchyard does not let them in. The text is for them."""


def identity_login(*, claims: Claims, admit_all: bool, now: datetime) -> User:
    """The user behind the claims, with their groups as the provider has them now.

    Raises:
        NotAdmitted: in no group that counts here (unless `admit_all`), deactivated, or the name is taken or unusable.
    """
    with transaction.atomic():
        known = Identity.objects.select_related("user").filter(issuer=claims.issuer, subject=claims.subject).first()
        theirs = list(Group.objects.filter(role__claim__in=claims.groups).exclude(role__claim=""))
        user = known.user if known else None
        if user is None and (theirs or admit_all):
            user = _new_user(claims, now)
        if user is not None:
            by_hand = user.groups.filter(role__claim="")
            user.groups.set([*by_hand, *theirs])
    if user is None or not (theirs or admit_all or user.is_superuser or user.groups.exists()):
        raise NotAdmitted(f"{claims.username} is in no group that Switchyard knows; ask an admin to map one of yours")
    if not user.is_active:
        raise NotAdmitted(f"{user.username} is deactivated; ask an admin")
    return user


def _new_user(claims: Claims, now: datetime) -> User:
    if not USERNAME.fullmatch(claims.username):
        raise NotAdmitted(f"{claims.username!r} cannot be a user name here; letters, digits and -_.@+ can")
    if User.objects.filter(username__iexact=claims.username).exists():
        raise NotAdmitted(f"there is another user {claims.username} here already; ask an admin")
    user = User.objects.create(username=claims.username, email=claims.email[:254])
    user.set_unusable_password()
    user.save(update_fields=["password"])
    Identity.objects.create(user=user, issuer=claims.issuer, subject=claims.subject, created_at=now)
    message = f"user {user.username} came by {claims.issuer} for the first time"
    event_record(kind="user.created", message=message, now=now, actor=user.username[:64])
    return user
