"""The secrets by which ingresses of one fleet know each other. They are derived, never stored, and shown nowhere."""

from django.conf import settings
from django.utils.crypto import salted_hmac

SALT = "switchyard.traffic.hops"
MAX_SECRETS = 2
"""What an ingress believes: the secret in use and the one before."""


def hop_secrets() -> tuple[str, ...]:
    """The secret to sign with first. A new SECRET_KEY gives a new one; the first of SECRET_KEY_FALLBACKS, the other."""
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS][:MAX_SECRETS]
    return tuple(salted_hmac(SALT, "", secret=key, algorithm="sha256").hexdigest() for key in keys)
