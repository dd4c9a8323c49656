"""Decides the state of a key, what ingresses get of it, when every ingress refuses a revoked key, and the effect of
revoking or requiring keys. Pure. It also derives the key texts with which the control plane sends accepted requests:
they come from the installation's secret, so they are never stored, and routing tables carry their digest next to that
of the application's key. A derived text grants exactly what the application's key grants at that time."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from engine_agent.protocol.ingress_messages import ORIGIN, ApiKey
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import ServingClass
from kernel.tones import Tone

LIMITS = ("requests_per_min", "tokens_per_min", "max_concurrent")
MAX_ORIGINS = 20
"""Per key; each origin is an entry of every ingress's map."""
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class KeyState(StrEnum):
    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


KEY_TONE = {KeyState.ACTIVE: Tone.OK, KeyState.EXPIRED: Tone.IDLE, KeyState.REVOKED: Tone.BAD}


@dataclass(frozen=True, slots=True)
class KeyRingVersion:
    """The version of all keys, and whether a key is required. Version 0 means that no key was ever created."""

    version: int = 0
    required: bool = False


@dataclass(frozen=True, slots=True)
class RevokedKey:
    prefix: str
    version: int


def key_state(*, revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> KeyState:
    if revoked_at is not None:
        return KeyState.REVOKED
    return KeyState.EXPIRED if expires_at is not None and expires_at <= now else KeyState.ACTIVE


def checked_origin(text: str) -> str:
    """Returns the origin as a browser writes it. Raises ValueError if it is not an origin; the text shows the
    format."""
    origin = text.strip().casefold().removesuffix("/")
    origin = origin.removesuffix(_USUAL_PORTS.get(origin.partition(":")[0], "\0"))
    if not ORIGIN.fullmatch(origin):
        raise ValueError(f"{text[:80]!r} is not an origin: use scheme, host and port, such as https://app.example:8443")
    return origin


def key_ring(standing: KeyRingVersion, ingresses: int) -> JsonObject:
    """Returns the part of a stored routing table about keys, for the ingresses of a region. Empty before the first
    key."""
    if standing.version == 0:
        return {}
    return {"version": standing.version, "required": standing.required, "ingresses": max(1, ingresses)}


def describe_keys(before: JsonObject, after: JsonObject) -> list[str]:
    """Returns one phrase per difference."""
    changes = []
    if before.get("required", False) != after.get("required", False):
        changes.append("keys are required" if after["required"] else "keys are no longer required")
    if before.get("version", 0) != after.get("version", 0) and not changes:
        changes.append("keys changed")
    if before and before["ingresses"] != after["ingresses"]:
        changes.append(f"{after['ingresses']} ingresses share key limits")
    return changes


def shared_keys(keys: Iterable[ApiKey], ingresses: int) -> tuple[ApiKey, ...]:
    """Returns the keys as each of `ingresses` enforces them. Each ingress counts alone, so it gets its part of a limit.
    A part is at least 1, because 0 would mean no limit."""
    if ingresses <= 1:
        return tuple(keys)
    return tuple(_key_share(key, ingresses) for key in keys)


def _key_share(key: ApiKey, ingresses: int) -> ApiKey:
    shares = {limit: -(-getattr(key, limit) // ingresses) for limit in LIMITS}
    return msgspec.structs.replace(key, **shares)


def plan_refused(revoked: Iterable[RevokedKey], in_force: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the prefixes of keys that every ingress refuses. `in_force` maps an ingress to the version that it
    enforces. Without ingresses, all keys count as refused."""
    oldest = min(in_force.values(), default=None)
    return tuple(key.prefix for key in revoked if oldest is None or oldest >= key.version)


USUAL_LAG_S = 5
"""Expected time while ingresses are connected; `key.refused` events have the actual times."""


def revoking_effect(*, ingresses: int, requests_24h: int, last_used_at: datetime | None) -> str:
    count = "1 ingress" if ingresses == 1 else f"{ingresses} ingresses"
    who = f"by {count}, within about {USUAL_LAG_S} s" if ingresses else "as soon as an ingress serves"
    if last_used_at is None:
        used = "It has not been used yet."
    else:
        used = f"It made {requests_24h} requests in the last 24 h, the last one at {last_used_at:%Y-%m-%d %H:%M} UTC."
    return f"Requests with this key are refused with 401 {who}. {used}"


def effect_of_requiring(*, required: bool, active_keys: int) -> str:
    if required:
        return "Requests without a key are served again, without a tenant and without limits."
    keys = "1 key" if active_keys == 1 else f"{active_keys} keys"
    warning = "" if active_keys else ": no request would be served"
    return f"Requests without a key are refused with 401; {keys} would open the fleet{warning}."


_SENDER, _PLAYGROUND = "switchyard sender", "switchyard playground"
_SECRET_LETTERS = 48
_PREFIX_DIGITS = 16
"""More than in application keys (`kernel.secrets`), so no two are equal."""


PLAYGROUND_TENANT = "switchyard-playground"
"""Tenant of requests from the dashboard's playground, where keys are required."""


def sender_key_text(prefix: str, secret: str) -> str:
    return _internal_text(_SENDER, prefix, secret)


def with_sender(key: ApiKey, secret: str) -> ApiKey:
    return msgspec.structs.replace(key, sender_digest=_key_digest(sender_key_text(key.prefix, secret)))


def is_counted(prefix: str, proof: str, secret: str) -> bool:
    """Returns whether the ingress's acknowledgement proves that it counted a request against this key. It needs the
    digest of the sender text, which the application does not know."""
    return hmac.compare_digest(_key_digest(sender_key_text(prefix, secret)).encode(), proof.encode())


def playground_key_text(secret: str) -> str:
    """Returns the playground's key text. Its users are limited by their roles, not by this key."""
    return _internal_text(_PLAYGROUND, "", secret)


def playground_key(secret: str) -> ApiKey:
    text = playground_key_text(secret)
    prefix, tenant = text.split("_")[1], PLAYGROUND_TENANT
    return ApiKey(prefix, _key_digest(text), tenant, serving_class=ServingClass.NEAR_REALTIME.value)


def _internal_text(purpose: str, name: str, secret: str) -> str:
    prefix = hashlib.sha256(f"{purpose}\0{name}".encode()).hexdigest()[:_PREFIX_DIGITS]
    proof = hmac.new(secret.encode(), f"{purpose}\0{name}".encode(), "sha256").hexdigest()
    return f"sw_{prefix}_{proof[:_SECRET_LETTERS]}"


def _key_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
