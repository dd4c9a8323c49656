"""Decides which versions compile, and which compile caches make room for a new one. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

COMPILING = ("neuron", "vllm")
"""Engines whose adapters have a compile cache."""

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


def why_not_compiled(spec: VersionSpec) -> str:
    """Returns why no engine of this version compiles, as a sentence; "" if one does on some instance type."""
    reasons = set()
    for kind in spec.instance_types:
        try:
            on_type = spec.on(kind)
        except InvalidVersion:
            return ""
        reasons.add(_without_compiler(on_type))
    return "" if "" in reasons else " ".join(sorted(reasons))


def _without_compiler(spec: VersionSpec) -> str:
    if spec.engine not in COMPILING:
        return f"Engine {spec.engine} has no compile cache."
    if spec.engine == "vllm" and any(
        value is True for name, value in spec.engine_options.items() if name.replace("_", "-") == "enforce-eager"
    ):
        return "This version does not compile: it states enforce_eager."
    if spec.engine == "vllm" and spec.engine_env.get("TORCH_COMPILE_DISABLE") == "1":
        return "This version does not compile: it states TORCH_COMPILE_DISABLE."
    return ""
