"""Lets people in: by a password, in few hash slots and after its attempt was counted; and who an identity provider
vouches for: finds or makes the user, and gives it the groups that its claims name. Groups without a claim are given by
hand and stay. A name that a local user has already is never taken over.
"""

from datetime import datetime
from typing import TYPE_CHECKING

from django.contrib.auth import authenticate
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.http import HttpRequest

from accounts.hashing import hash_slot
from accounts.models import Identity
from accounts.names import name_refusal
from accounts.services.login_limit import Attempt, attempt_count, attempt_forget
from kernel.events import event_record
from kernel.refusals import Refusal

if TYPE_CHECKING:  # its library takes longer to import than Django, and only web speaks to a provider
    from accounts.oidc import Claims


class LoginLimited(Refusal):
    """Too many wrong passwords, or second factors; none is heard for `wait_s`."""

    def __init__(self, wait_s: float, message: str = "too many wrong passwords; try again in a few minutes") -> None:
        super().__init__(message)
        self.wait_s = wait_s


def password_login(*, request: HttpRequest, attempt: Attempt, password: str, now: datetime) -> User | None:
    """The user with this name and password, or None. Never part of a transaction: no connection waits for the hash.

    Raises:
        Busy: too many passwords are being checked.
        LoginLimited: too many were wrong.
    """
    with hash_slot(known=bool(attempt.device)):
        with transaction.atomic(durable=True):
            wait_s = attempt_count(attempt=attempt, now=now)
        if wait_s > 0:
            raise LoginLimited(wait_s)
        user = authenticate(request, username=attempt.username, password=password)
        if user is not None:
            attempt_forget(attempt=attempt, at=now)
    return user if isinstance(user, User) else None


class NotAdmitted(Refusal):
    """The provider knows them; Switchyard does not let them in. The text is for them."""


def identity_login(*, claims: "Claims", admit_all: bool, now: datetime) -> User:
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


def _new_user(claims: "Claims", now: datetime) -> User:
    if refusal := name_refusal(claims.username):
        raise NotAdmitted(refusal)
    if User.objects.filter(username__iexact=claims.username).exists():
        raise NotAdmitted(f"there is another user {claims.username} here already; ask an admin")
    user = User.objects.create(username=claims.username, email=claims.email[:254])
    user.set_unusable_password()
    user.save(update_fields=["password"])
    Identity.objects.create(user=user, issuer=claims.issuer, subject=claims.subject, created_at=now)
    message = f"user {user.username} came by {claims.issuer} for the first time"
    event_record(kind="user.created", message=message, now=now, actor=user.username[:64])
    return user
