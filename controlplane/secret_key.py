"""Checks the key that signs sessions, marks of ingresses and keys of the fleet's requests. It has no default: signing
without one fails, and processes do not start."""

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

SHORTEST = 50
FEWEST_LETTERS = 5
"""As Django's own deployment check has them (security.W009)."""


def require_secret_key() -> None:
    """Part of the start of each process of the control plane. Raises SystemExit if there is no key, or one that could
    be guessed."""
    try:
        key = settings.SECRET_KEY
    except ImproperlyConfigured:
        key = ""
    if len(key) < SHORTEST or len(set(key)) < FEWEST_LETTERS:
        letters = f", {len(set(key))} different" if len(set(key)) < FEWEST_LETTERS else ""
        what = f"has {len(key)} characters{letters}" if key else "is not set"
        raise SystemExit(
            f"SWITCHYARD_SECRET_KEY {what}: it signs sessions, so knowing it makes one an admin. Set it to {SHORTEST} "
            "or more random characters, the same for all processes of this installation, such as "
            "`python3 -c 'import secrets; print(secrets.token_urlsafe(48))'` prints."
        )
