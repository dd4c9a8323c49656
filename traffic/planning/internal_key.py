"""The keys by which the control plane itself asks an ingress to serve a tenant's accepted work. Pure.

Each is derived from the installation's secret, so nothing has to be stored or handed over: routing tables carry its
digest like that of any other key, and whoever sends knows its text. It has no limits, because the work was admitted.
"""

import hashlib
import hmac
from collections.abc import Iterable

from engine_agent.protocol.messages import ApiKey
from engine_agent.protocol.states import ServingClass

_PURPOSE = "switchyard accepted work"
_SECRET_LETTERS = 48


PLAYGROUND_TENANT = "switchyard-playground"
"""Whose requests those of the dashboard's playground are, where keys are required."""


def internal_key_text(tenant: str, secret: str) -> str:
    """The text to show for a tenant."""
    digest = hmac.new(secret.encode(), f"{_PURPOSE}\0{tenant}".encode(), "sha256").hexdigest()
    return f"sw_{_prefix(tenant)}_{digest[:_SECRET_LETTERS]}"


def internal_keys(tenants: Iterable[str], secret: str) -> tuple[ApiKey, ...]:
    """One key for each tenant, as routing tables carry it, in the order of their names."""
    return tuple(
        ApiKey(
            prefix=_prefix(tenant),
            digest=hashlib.sha256(internal_key_text(tenant, secret).encode()).hexdigest(),
            tenant=tenant,
            serving_class=ServingClass.NEAR_REALTIME.value,
        )
        for tenant in sorted(set(tenants))
    )


def _prefix(tenant: str) -> str:
    """Twice as long as those of other keys, so that it is none of them."""
    return hashlib.sha256(f"{_PURPOSE}\0{tenant}".encode()).hexdigest()[:16]
