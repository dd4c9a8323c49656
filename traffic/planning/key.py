"""Application keys: what state one is in, what the ingresses are told of them, and when a revoked one is refused
everywhere. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from engine_agent.protocol.messages import ApiKey, JsonObject
from kernel.tones import Tone

LIMITS = ("requests_per_min", "tokens_per_min", "max_concurrent")


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


def key_ring(standing: KeyStanding, ingresses: int) -> JsonObject:
    """What a stored routing table says of keys: how each of a region's ingresses must have them. Empty before the first
    key."""
    if standing.version == 0:
        return {}
    return {"version": standing.version, "required": standing.required, "ingresses": max(1, ingresses)}


def describe_keys(before: JsonObject, after: JsonObject) -> list[str]:
    """How two of these differ, in words."""
    words = []
    if before.get("required", False) != after.get("required", False):
        words.append("keys are required" if after["required"] else "keys are no longer required")
    if before.get("version", 0) != after.get("version", 0) and not words:
        words.append("keys changed")
    if before and before["ingresses"] != after["ingresses"]:
        words.append(f"{after['ingresses']} ingresses share the limits of keys")
    return words


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

    Without any ingress there is nobody who could take one.
    """
    oldest = min(in_force.values(), default=None)
    return tuple(key.prefix for key in revoked if oldest is None or oldest >= key.version)
