"""Reads compile caches: the one for a start, and those of a version."""

from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db.models import QuerySet

from engine_agent.protocol.manifest import DIGEST_PREFIX
from models_registry.compile_caches.models import CompileCache


@dataclass(frozen=True, slots=True)
class CachePlace:
    """A node's place in a cell, by the rows of the control plane. `is_serving`: its cell is ready and its node is not
    under suspicion."""

    node: str
    cell: str
    version: int
    instance_type: str
    rank: int
    is_serving: bool


def cache_room_bytes() -> int:
    """0 if caches are not shared."""
    return int(settings.COMPILE_CACHE_STORE_GIB) * 1024**3


def cache_find(place: CachePlace, key: str) -> CompileCache | None:
    return CompileCache.objects.filter(
        version=place.version, instance_type=place.instance_type, rank=place.rank, key=key
    ).first()


def is_in_bucket() -> bool:
    return str(settings.COMPILE_CACHES).startswith("s3://")


def cache_folder() -> Path:
    """Archives are here, or uploads to the bucket."""
    return settings.SWITCHYARD_HOME / "compile-caches" if is_in_bucket() else Path(settings.COMPILE_CACHES)


def cache_path(digest: str) -> Path:
    """The file of an archive on this host, which has it or not."""
    return cache_folder() / digest.removeprefix(DIGEST_PREFIX)


def caches_of(version: int) -> "QuerySet[CompileCache]":
    return CompileCache.objects.filter(version=version).order_by("instance_type", "rank", "id")


def caches_bytes() -> int:
    """Of all archives, each counted once."""
    return sum(dict(CompileCache.objects.values_list("digest", "packed_bytes")).values())
