"""Application keys: what state one is in, what the ingresses get of them, when a revoked one is refused everywhere, and
what revoking or requiring keys would do. Also the texts by which the control plane itself sends what applications
handed in for later: each is derived from the installation's secret, so nothing is stored or handed over, and routing
tables carry its digest beside the application's own. Such a text is another way to show the same key: what the key does
not open, or has no more tokens for, it does not open later either. Pure."""

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
"""Of one key; each is an entry of every ingress's map."""
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class KeyState(StrEnum):
    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


KEY_TONE = {KeyState.ACTIVE: Tone.OK, KeyState.EXPIRED: Tone.IDLE, KeyState.REVOKED: Tone.BAD}


@dataclass(frozen=True, slots=True)
class KeyStanding:
    """The version of all keys, and whether one is required to be served. Version 0: there never was a key."""

    version: int = 0
    required: bool = False


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A revoked key, and the first version of all keys without it."""

    prefix: str
    version: int


def key_state(*, revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> KeyState:
    if revoked_at is not None:
        return KeyState.REVOKED
    return KeyState.EXPIRED if expires_at is not None and expires_at <= now else KeyState.ACTIVE


def checked_origin(text: str) -> str:
    """The origin of a page, as a browser will write it.

    Raises:
        ValueError: it is none; the text says what one looks like.
    """
    origin = text.strip().casefold().removesuffix("/")
    origin = origin.removesuffix(_USUAL_PORTS.get(origin.partition(":")[0], "\0"))
    if not ORIGIN.fullmatch(origin):
        raise ValueError(f"{text[:80]!r} is no origin: write scheme, host and port, such as https://app.example:8443")
    return origin


def key_ring(standing: KeyStanding, ingresses: int) -> JsonObject:
    """What a stored routing table says of keys: how each of a region's ingresses must have them. Empty before the first
    key."""
    if standing.version == 0:
        return {}
    return {"version": standing.version, "required": standing.required, "ingresses": max(1, ingresses)}


def describe_keys(before: JsonObject, after: JsonObject) -> list[str]:
    """How two of these differ, one phrase each."""
    changes = []
    if before.get("required", False) != after.get("required", False):
        changes.append("keys are required" if after["required"] else "keys are no longer required")
    if before.get("version", 0) != after.get("version", 0) and not changes:
        changes.append("keys changed")
    if before and before["ingresses"] != after["ingresses"]:
        changes.append(f"{after['ingresses']} ingresses share the limits of keys")
    return changes


def shared_keys(keys: Iterable[ApiKey], ingresses: int) -> tuple[ApiKey, ...]:
    """The keys as each of so many ingresses enforces them: each counts alone, so each gets its share of a limit.

    A share is never 0, which would be no limit; so more ingresses than a limit has units allow one each.
    """
    if ingresses <= 1:
        return tuple(keys)
    return tuple(_shared(key, ingresses) for key in keys)


def _shared(key: ApiKey, ingresses: int) -> ApiKey:
    shares = {limit: -(-getattr(key, limit) // ingresses) for limit in LIMITS}
    return msgspec.structs.replace(key, **shares)


def plan_refused(revoked: Iterable[RevokedKey], in_force: Mapping[str, int]) -> tuple[str, ...]:
    """Prefixes of those keys that no ingress takes any more; `in_force` maps ingress -> the version that it enforces.

    Without any ingress none could take one.
    """
    oldest = min(in_force.values(), default=None)
    return tuple(key.prefix for key in revoked if oldest is None or oldest >= key.version)


USUAL_LAG_S = 5
"""What is promised while ingresses are connected; `key.refused` events say what it was."""


def revoking_effect(*, ingresses: int, requests_24h: int, last_used_at: datetime | None) -> str:
    count = "1 ingress" if ingresses == 1 else f"{ingresses} ingresses"
    who = f"by {count}, within about {USUAL_LAG_S} s" if ingresses else "as soon as an ingress serves"
    if last_used_at is None:
        used = "It has not been used yet."
    else:
        used = f"It made {requests_24h} requests in the last 24 h, the last one at {last_used_at:%Y-%m-%d %H:%M} UTC."
    return f"Requests with this key are refused with 401 {who}. {used}"


def requiring_effect(*, required: bool, active_keys: int) -> str:
    """One sentence for the other position of the switch."""
    if required:
        return "Requests without a key are served again, without a tenant and without limits."
    keys = "1 key" if active_keys == 1 else f"{active_keys} keys"
    warning = "" if active_keys else ": no request would be served"
    return f"Requests without a key are refused with 401; {keys} would open the fleet{warning}."


_SENDER, _PLAYGROUND = "switchyard sender", "switchyard playground"
_SECRET_LETTERS = 48


PLAYGROUND_TENANT = "switchyard-playground"
"""Whose requests those of the dashboard's playground are, where keys are required."""


def sender_key_text(prefix: str, secret: str) -> str:
    """What the sender shows for a request that came with the key of this prefix."""
    return _internal_text(_SENDER, prefix, secret)


def with_sender(key: ApiKey, secret: str) -> ApiKey:
    """The key with the digest of the text that the sender shows for it."""
    return msgspec.structs.replace(key, sender_digest=_digest(sender_key_text(key.prefix, secret)))


def is_counted(prefix: str, proof: str, secret: str) -> bool:
    """Whether an ingress says that it has counted a request against this key: it knows the digest of the other text,
    which the application does not."""
    return hmac.compare_digest(_digest(sender_key_text(prefix, secret)).encode(), proof.encode())


def playground_key_text(secret: str) -> str:
    """What the playground shows; people who may use it are bound by their roles, not by this key."""
    return _internal_text(_PLAYGROUND, "", secret)


def playground_key(secret: str) -> ApiKey:
    """The key of the playground, as routing tables carry it."""
    text = playground_key_text(secret)
    prefix, tenant = text.split("_")[1], PLAYGROUND_TENANT
    return ApiKey(prefix, _digest(text), tenant, serving_class=ServingClass.NEAR_REALTIME.value)


def _internal_text(purpose: str, name: str, secret: str) -> str:
    """The middle part is twice as long as in other keys, so that it is none of them."""
    prefix = hashlib.sha256(f"{purpose}\0{name}".encode()).hexdigest()[:16]
    proof = hmac.new(secret.encode(), f"{purpose}\0{name}".encode(), "sha256").hexdigest()
    return f"sw_{prefix}_{proof[:_SECRET_LETTERS]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
