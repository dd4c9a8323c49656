"""Slows down guessing of passwords: after `failures_allowed` wrong ones for a user name from an address, none is tried.

The count lives in PostgreSQL, so it holds over several web processes and restarts.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from accounts.models import LoginFailure


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
