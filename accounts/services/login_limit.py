"""Slows down guessing of passwords. Each attempt is counted before its password is looked at, and taken back when it
was right: so guesses that run side by side see each other. The counts live in PostgreSQL, over several web processes.

What is counted is what is tried: `login_name` is the one spelling under which a name is both looked up and counted.
"""

import hashlib
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta

from accounts.models import LoginFailure
from kernel.addresses import client_network

LONGEST_NAME = 150
"""Django's; nobody has a longer one."""


@dataclass(frozen=True, slots=True)
class LoginLimits:
    """Wrong passwords heard within `window_s`. Ten for a name from an address is far above human mistyping and leaves a
    guesser under 3,000 tries a day; an office behind one address has 50; a name has 100, wherever they come from; all
    strangers together 600. A browser that logged in before counts alone, so none of these keeps it out. Second factors
    of a user count by themselves, because a right password, which takes back its own, must not take these back."""

    window_s: float = 300.0
    of_name_and_address: int = 10
    of_address: int = 50
    of_name: int = 100
    of_all: int = 600
    of_device: int = 10
    of_factor: int = 10


LIMITS = LoginLimits()


def login_name(text: str) -> str:
    """What was typed as a user name, as it is looked up; "" for what nobody is called."""
    name = unicodedata.normalize("NFKC", text[: 4 * LONGEST_NAME]).strip()
    return "" if len(name) > LONGEST_NAME or not name.isprintable() else name


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who tries to log in, from where, and with which browser if it is known (accounts.devices)."""

    username: str
    address: str
    device: str = ""

    def counted(self, limits: LoginLimits) -> dict[str, int]:
        """What it counts against: a digest, because people type passwords into the wrong field, and its limit."""
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
    """Who shows a second factor, with which browser if it is known. The address does not matter: whoever gets here has
    the password."""

    user_id: int
    device: str = ""

    def counted(self, limits: LoginLimits) -> dict[str, int]:
        return {_digest("factor", str(self.user_id), self.device): limits.of_factor}


def attempt_count(*, attempt: Attempt | FactorAttempt, now: datetime, limits: LoginLimits = LIMITS) -> float:
    """Count an attempt before it is made. Returns 0, or the seconds until it would be heard; then it is not."""
    since = now - timedelta(seconds=limits.window_s)
    counted = attempt.counted(limits)
    LoginFailure.objects.filter(at__lte=since).delete()
    rows = LoginFailure.objects.bulk_create([LoginFailure(subject=subject, at=now) for subject in counted])
    wait_s = max(_wait_s(subject, most, since) for subject, most in counted.items())
    if wait_s > 0:
        LoginFailure.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return wait_s


def attempt_forget(*, attempt: Attempt | FactorAttempt, at: datetime, limits: LoginLimits = LIMITS) -> None:
    """It was right: the attempt counts for nothing, and the wrong ones of this user from here do no more."""
    own, *others = attempt.counted(limits)
    LoginFailure.objects.filter(subject=own).delete()
    LoginFailure.objects.filter(subject__in=others, at=at).delete()


def _wait_s(subject: str, most: int, since: datetime) -> float:
    newest = LoginFailure.objects.filter(subject=subject, at__gt=since).order_by("-at", "-pk")
    beyond = newest.values_list("at", flat=True)[most : most + 1].first()
    return (beyond - since).total_seconds() if beyond is not None else 0.0


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()
