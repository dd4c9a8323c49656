"""Secrets that are shown once: `sw_<prefix>_<secret>`. The prefix finds the row, the hash proves the rest.

The secret has 192 random bits, so a plain SHA-256 is enough: there is nothing to guess."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cryptography.fernet import Fernet
from django.db import IntegrityError, models, transaction
from django.utils.crypto import salted_hmac

PREFIX_BYTES = 7
"""Of 20,000 prefixes issued together, two are equal in one of 360 million runs. One byte less than the columns hold:
keys that the control plane derives for itself use their full length (`traffic.keys.planner`), so none is equal."""
SECRET_BYTES = 24
PREFIX_DIGITS = 2 * PREFIX_BYTES
SECRET_PATTERN = rf"sw_(?P<prefix>[0-9a-f]{{{PREFIX_DIGITS}}})_[0-9a-f]{{{2 * SECRET_BYTES}}}"
"""Regular expression of every issued secret."""
ISSUE_TRIES = 3

Row = TypeVar("Row", bound=models.Model)


@dataclass(frozen=True, slots=True)
class Issued:
    """A new secret: `text` is shown to its owner once, `prefix` and `digest` are stored."""

    text: str
    prefix: str
    digest: str


def _new_prefix() -> str:
    return secrets.token_hex(PREFIX_BYTES)


def secret_issue() -> Issued:
    prefix = _new_prefix()
    text = f"sw_{prefix}_{secrets.token_hex(SECRET_BYTES)}"
    return Issued(text=text, prefix=prefix, digest=secret_digest(text))


def secret_issue_again(salt: str, prefix: str = "") -> Issued:
    """Derives a secret from SECRET_KEY, its prefix and `salt`, so that it can be derived again. Without a prefix it is
    a new one."""
    prefix = prefix or _new_prefix()
    own = salted_hmac(f"kernel.secrets.{salt}", prefix, algorithm="sha256").hexdigest()[: 2 * SECRET_BYTES]
    text = f"sw_{prefix}_{own}"
    return Issued(text=text, prefix=prefix, digest=secret_digest(text))


def secret_row_create(model: type[Row], issue: Callable[[], Issued] = secret_issue, **columns: Any) -> tuple[Row, str]:
    """Creates a row with the `prefix` and `digest` of a new secret. Returns it with the secret's text.

    Tries another secret if the prefix exists. Raises RuntimeError after `ISSUE_TRIES`, because this host's random
    numbers then repeat."""
    rows = model._default_manager
    for _ in range(ISSUE_TRIES):
        issued = issue()
        try:
            with transaction.atomic():
                return rows.create(prefix=issued.prefix, digest=issued.digest, **columns), issued.text
        except IntegrityError:
            if not rows.filter(prefix=issued.prefix).exists():
                raise
    raise RuntimeError(f"{ISSUE_TRIES} new secrets had prefixes that exist: this host's random numbers repeat")


def secret_digest(text: str) -> str:
    """Returns the stored digest of a secret: lower-case hex SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def secret_prefix(text: str) -> str | None:
    """Returns the prefix of a presented secret, which finds its row, or None if it does not have this form."""
    parts = text.split("_")
    return parts[1] if len(parts) == 3 and parts[0] == "sw" else None


def secret_matches(text: str, digest: str) -> bool:
    return hmac.compare_digest(secret_digest(text), digest)


def secret_box(purpose: str) -> Fernet:
    """Returns the box that encrypts stored secrets of third parties for one purpose, with a key from SECRET_KEY."""
    return Fernet(base64.urlsafe_b64encode(salted_hmac(purpose, "", algorithm="sha256").digest()))
