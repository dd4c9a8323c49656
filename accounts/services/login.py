"""Logs people in, by a password after its attempt was counted, or by an identity provider: then it finds or creates the
user and sets the groups that its claims name. Groups without a claim are set by hand and stay. The name of a local user
is never taken over."""

import hashlib
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.contrib.auth import authenticate
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.http import HttpRequest

from accounts.hashing import hash_slot
from accounts.models import Identity, LoginFailure, name_refusal
from accounts.selectors import admins
from accounts.services.user import require_an_admin
from kernel.addresses import client_network
from kernel.events import event_record
from kernel.refusals import Conflict, Refusal

LONGEST_NAME = 150
"""Django's maximum length of a user name."""


@dataclass(frozen=True, slots=True)
class LoginLimits:
    """Wrong attempts allowed within `window_s`: 10 for a name from one address, which allows for typing errors and
    leaves an attacker under 3,000 tries a day; 50 for an address, such as an office; 100 for a name; 600 for all
    unknown browsers together. A known browser is counted separately, so these limits never lock it out. Second factors
    are counted separately, because a right password clears only its own count."""

    window_s: float = 300.0
    of_name_and_address: int = 10
    of_address: int = 50
    of_name: int = 100
    of_all: int = 600
    of_device: int = 10
    of_factor: int = 10


LIMITS = LoginLimits()


def login_name(text: str) -> str:
    """Returns the typed name in the form in which it is looked up, or "" if it cannot be a user name."""
    name = unicodedata.normalize("NFKC", text[: 4 * LONGEST_NAME]).strip()
    return "" if len(name) > LONGEST_NAME or not name.isprintable() else name


@dataclass(frozen=True, slots=True)
class Attempt:
    """A login attempt: name, address, and the number of a known browser (accounts.views)."""

    username: str
    address: str
    device: str = ""

    def counted(self, limits: LoginLimits) -> dict[str, int]:
        """Returns the counters of the attempt with their limits, as digests, because people type passwords into the
        wrong field."""
        name, network = self.username.casefold(), client_network(self.address)
        if self.device:
            return {_digest("device", name, self.device): limits.of_device}
        return {
            _digest("name and address", name, network): limits.of_name_and_address,
            _digest("address", network): limits.of_address,
            _digest("name", name): limits.of_name,
            _digest("all"): limits.of_all,
        }


@dataclass(frozen=True, slots=True)
class FactorAttempt:
    """An attempt to show a second factor, with the number of a known browser. The address does not count, because these
    users have the password."""

    user_id: int
    device: str = ""

    def counted(self, limits: LoginLimits) -> dict[str, int]:
        return {_digest("factor", str(self.user_id), self.device): limits.of_factor}


def attempt_count(*, attempt: Attempt | FactorAttempt, now: datetime, limits: LoginLimits = LIMITS) -> float:
    """Count an attempt before it is made. Returns 0, or the seconds until one is allowed."""
    since = now - timedelta(seconds=limits.window_s)
    counted = attempt.counted(limits)
    LoginFailure.objects.filter(at__lte=since).delete()
    rows = LoginFailure.objects.bulk_create([LoginFailure(subject=subject, at=now) for subject in counted])
    wait_s = max(_wait_s(subject, most, since) for subject, most in counted.items())
    if wait_s > 0:
        LoginFailure.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return wait_s


def attempt_forget(*, attempt: Attempt | FactorAttempt, at: datetime, limits: LoginLimits = LIMITS) -> None:
    """Clear the count of a right attempt, and this user's earlier wrong ones from here."""
    own, *others = attempt.counted(limits)
    LoginFailure.objects.filter(subject=own).delete()
    LoginFailure.objects.filter(subject__in=others, at=at).delete()


def _wait_s(subject: str, most: int, since: datetime) -> float:
    newest = LoginFailure.objects.filter(subject=subject, at__gt=since).order_by("-at", "-pk")
    beyond = newest.values_list("at", flat=True)[most : most + 1].first()
    return (beyond - since).total_seconds() if beyond is not None else 0.0


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


if TYPE_CHECKING:  # its library takes longer to import than Django, and only web needs it
    from accounts.oidc import Claims


class LoginLimited(Refusal):
    """Too many wrong passwords or second factors; no attempt is allowed for `wait_s`."""

    def __init__(self, wait_s: float, message: str = "too many wrong passwords; try again in a few minutes") -> None:
        super().__init__(message)
        self.wait_s = wait_s


def password_login(*, request: HttpRequest, attempt: Attempt, password: str, now: datetime) -> User | None:
    """Returns the user with this name and password, or None. Call it outside a transaction: it computes a hash. Raises
    Busy if too many passwords are being checked. Raises LoginLimited if too many were wrong."""
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
    """The provider knows the user, but Switchyard rejects the login. The text is for the user."""


class NotMapped(NotAdmitted):
    """None of the user's groups at the provider is mapped to a group of Switchyard."""


def identity_login(*, claims: "Claims", admit_all: bool, now: datetime) -> User:
    """Returns the user of the claims, with the current groups at the provider. Raises NotMapped if the user is in no
    mapped group (unless `admit_all`). Raises NotAdmitted if the user is deactivated, the name is taken or invalid, or
    no admin would be left, such as after a wrong name of the groups claim."""
    with transaction.atomic():
        known = Identity.objects.select_related("user").filter(issuer=claims.issuer, subject=claims.subject).first()
        theirs = list(Group.objects.filter(role__claim__in=claims.groups).exclude(role__claim=""))
        user = known.user if known else None
        if user is None and (theirs or admit_all):
            user = _new_user(claims, now)
        if user is not None:
            _set_groups(user, theirs)
    if user is not None and not user.is_active:
        raise NotAdmitted(f"{user.username} is deactivated; ask an admin")
    if user is None or not (theirs or admit_all or user.is_superuser or user.groups.exists()):
        raise NotMapped(f"no group of {claims.username} is mapped in Switchyard; ask an admin to map one")
    return user


def _set_groups(user: User, theirs: list[Group]) -> None:
    was_admin = User.objects.filter(admins(), pk=user.pk).exists()
    user.groups.set([*user.groups.filter(role__claim=""), *theirs])
    if was_admin and not User.objects.filter(admins(), pk=user.pk).exists():
        try:
            require_an_admin()
        except Conflict as conflict:
            raise NotAdmitted(f"the provider lists no group that makes you an admin: {conflict}") from None


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
