"""The application keys of a routing table as one HAProxy map. Pure. Keys are looked up by SHA-256, so the map does not
reveal them. All key data is in one map, because a map changes in one instant."""

import hashlib
import re
from collections.abc import Iterable
from enum import IntEnum

from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.ingress_messages import ORIGIN, ApiKey, RoutingTable
from engine_agent.protocol.states import ServingClass

KEYS_MAP = "keys.map"
"""SHA-256 of a key -> its record; `prefix/backend` -> 1 for each pool that a scoped key opens; `prefix@origin` -> 1 for
each origin of a key, and `.any@origin` for those of all keys."""
KEY_ORIGIN, ANY_KEY = "@", ".any"
REQUIRED_ENTRY = ".required"
"""1: every request needs a key."""
CONTENT_ENTRY = ".content"
"""Digest of all other entries, which are too many to read back four times a second."""
SEPARATOR = "|"
"""Between the fields of a record. In HAProxy, `;` ends a command."""
NEVER = 253_402_300_799
"""Expiry of a key without one: the end of the year 9999."""
PREFIX = re.compile(r"[0-9a-f]{4,16}")
DIGEST = re.compile(r"[0-9a-f]{64}")
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_LIMIT = 2**31 - 1


class KeyField(IntEnum):
    """Place of each field in a record; HAProxy's `field` counts from 1."""

    PREFIX = 1
    TENANT = 2
    URGENCY = 3
    EXPIRES_AT = 4
    REQUESTS_PER_MIN = 5
    TOKENS_PER_MIN = 6
    MAX_CONCURRENT = 7
    SCOPED = 8
    """1: it opens only pools with an entry."""
    LIMITED = 9
    SENDER = 10
    """1: the control plane's second text of this key. Otherwise the digest of that text, which proves that an ingress
    has counted a request; or 0."""
    OVER_QUOTA = 11


def key_entries(table: RoutingTable, backend_of: dict[str, str]) -> dict[str, str]:
    """The entries of `KEYS_MAP`. `backend_of`: pool -> backend. Raises BadTable for a key that cannot be meant."""
    _check_distinct("prefix", (key.prefix for key in table.keys))
    _check_distinct("digest", (digest for key in table.keys for digest in (key.digest, key.sender_digest) if digest))
    entries = {REQUIRED_ENTRY: "1" if table.keys_required else "0"}
    tenants_over, keys_over = frozenset(table.tenants_over_quota), frozenset(table.keys_over_quota)
    for key in table.keys:
        is_over = key.tenant in tenants_over or key.prefix in keys_over
        entries[key.digest] = _record(key, is_over)
        if key.sender_digest:
            entries[key.sender_digest] = _record(key, is_over, most_urgent=ServingClass.NEAR_REALTIME, sender=True)
        # Pools that this region does not have are no error: deployments come and go.
        entries |= {f"{key.prefix}/{backend_of[pool]}": "1" for pool in key.pools if pool in backend_of}
        entries |= _origin_entries(key)
    return entries | {CONTENT_ENTRY: _digest_of(entries)}


def _origin_entries(key: ApiKey) -> dict[str, str]:
    for origin in key.origins:
        if not ORIGIN.fullmatch(origin):
            raise BadTable(f"origin {origin[:80]!r} of key {key.prefix}: it must be like https://app.example:8443")
    return {f"{owner}{KEY_ORIGIN}{origin}": "1" for origin in key.origins for owner in (key.prefix, ANY_KEY)}


def urgency_of(serving_class: ServingClass) -> int:
    return list(ServingClass).index(serving_class)


def _record(
    key: ApiKey, is_over_quota: bool, most_urgent: ServingClass = ServingClass.REALTIME, *, sender: bool = False
) -> str:
    if not (PREFIX.fullmatch(key.prefix) and all(map(DIGEST.fullmatch, (key.digest, key.sender_digest or key.digest)))):
        raise BadTable(f"key {key.prefix!r}: prefix and digest must be lower-case hexadecimal, the digest a SHA-256")
    if not TENANT.fullmatch(key.tenant):
        raise BadTable(f"tenant {key.tenant!r} of key {key.prefix}: 1 to 64 letters, digits and ._- are allowed")
    limits = (key.requests_per_min, key.tokens_per_min, key.max_concurrent)
    if any(not 0 <= limit <= MAX_LIMIT for limit in limits):
        raise BadTable(f"limits of key {key.prefix} must be between 0 (none) and {MAX_LIMIT}, not {limits}")
    try:
        urgency = urgency_of(ServingClass(key.serving_class))
    except ValueError:
        raise BadTable(
            f"serving class {key.serving_class!r} of key {key.prefix} is none of {', '.join(ServingClass)}"
        ) from None
    expires_at = NEVER if key.expires_at is None else max(0, min(NEVER, int(key.expires_at)))
    fields = {
        KeyField.PREFIX: key.prefix,
        KeyField.TENANT: key.tenant,
        KeyField.URGENCY: max(urgency, urgency_of(most_urgent)),
        KeyField.EXPIRES_AT: expires_at,
        KeyField.REQUESTS_PER_MIN: key.requests_per_min,
        KeyField.TOKENS_PER_MIN: key.tokens_per_min,
        KeyField.MAX_CONCURRENT: key.max_concurrent,
        KeyField.SCOPED: int(bool(key.pools)),
        KeyField.LIMITED: int(any(limits)),
        KeyField.SENDER: "1" if sender else key.sender_digest or "0",
        KeyField.OVER_QUOTA: int(is_over_quota),
    }
    return SEPARATOR.join(str(fields[place]) for place in KeyField)


def _digest_of(entries: dict[str, str]) -> str:
    text = "".join(f"{name} {entries[name]}\n" for name in sorted(entries))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadTable(f"{what} {name} belongs to two keys")
        seen.add(name)
