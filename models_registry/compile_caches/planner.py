"""Decides which compile caches make room for a new one. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

SHARE_OF_ONE = 4
"""One cache may take this part of the whole room: a quarter."""
KEYS_PER_RANK = 8
"""Caches of one rank of a version on one instance type. Nodes name their keys, so that without a limit a hostile node
could replace the caches of all versions."""


@dataclass(frozen=True, slots=True)
class StoredCache:
    id: int
    version: int
    instance_type: str
    rank: int
    bytes: int
    used_at: datetime
    is_retired: bool


def most_bytes_of_one(room_bytes: int) -> int:
    return room_bytes // SHARE_OF_ONE


def plan_removals(new: StoredCache, others: Iterable[StoredCache], room_bytes: int) -> tuple[int, ...]:
    """Ids to remove so that `new` fits: first the least recently used of the same rank, above its number of keys; then
    of all, those of retired versions first."""
    rank = (new.version, new.instance_type, new.rank)
    kept = sorted(others, key=lambda cache: (not cache.is_retired, cache.used_at, cache.id))
    alike = [cache for cache in kept if (cache.version, cache.instance_type, cache.rank) == rank]
    removed = [cache.id for cache in alike[: max(0, len(alike) + 1 - KEYS_PER_RANK)]]
    kept = [cache for cache in kept if cache.id not in removed]
    excess = sum(cache.bytes for cache in kept) + new.bytes - room_bytes
    for cache in kept:
        if excess <= 0:
            break
        removed.append(cache.id)
        excess -= cache.bytes
    return tuple(removed)
