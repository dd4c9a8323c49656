"""Secrets that are shown once: `sw_<prefix>_<secret>`. The prefix finds the row, the hash proves the rest.

The secret has 192 random bits, so a plain SHA-256 is enough: there is nothing to guess."""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from cryptography.fernet import Fernet
from django.utils.crypto import salted_hmac

PREFIX_BYTES = 4
SECRET_BYTES = 24


@dataclass(frozen=True, slots=True)
class Issued:
    """A new secret: `text` is shown to its owner once, `prefix` and `digest` are stored."""

    text: str
    prefix: str
    digest: str


def secret_issue() -> Issued:
    prefix = secrets.token_hex(PREFIX_BYTES)
    text = f"sw_{prefix}_{secrets.token_hex(SECRET_BYTES)}"
    return Issued(text=text, prefix=prefix, digest=secret_digest(text))


def secret_issue_again(salt: str, prefix: str = "") -> Issued:
    """Derives a secret from SECRET_KEY, its prefix and `salt`, so that it can be derived again. Without a prefix it is
    a new one."""
    prefix = prefix or secrets.token_hex(PREFIX_BYTES)
    own = salted_hmac(f"kernel.secrets.{salt}", prefix, algorithm="sha256").hexdigest()[: 2 * SECRET_BYTES]
    text = f"sw_{prefix}_{own}"
    return Issued(text=text, prefix=prefix, digest=secret_digest(text))


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
