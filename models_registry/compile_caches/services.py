"""Stores compile caches that nodes upload in parts, and deletes them. A cache is code that engines execute: only a node
that serves in a cell of the version may add one, for its own rank and instance type, and none replaces another."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F

from engine_agent.protocol.compile_caches import PartRange
from engine_agent.protocol.manifest import DIGEST_PREFIX, is_sha256
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, Refusal
from kernel.tones import Tone
from models_registry.artifacts.planner import size_words
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.planner import StoredCache, most_bytes_of_one, plan_removals
from models_registry.compile_caches.selectors import CachePlace, cache_find, cache_path, cache_room_bytes
from models_registry.versions.planning.lifecycle import VersionState

UNFINISHED = ".parts"
STALE_S = 3600.0
"""After which an unfinished upload, or an archive without a row, is deleted."""
RESERVE_BYTES = 1024**3
"""Disk space that uploads leave free."""
ONE_OF_A_NODE_EVERY = timedelta(minutes=1)
"""Each upload writes events; a node starts one engine in this time."""
NOTE_USE_EVERY = timedelta(seconds=10)


class TooEarly(Refusal):
    """The cell does not serve yet."""


class TooLarge(Refusal):
    """There is no room for the cache."""


class BadUpload(Refusal):
    """The parts are not what their sender states."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """One part of an upload. `digest`: SHA-256 of the whole archive, in hexadecimal."""

    key: str
    range: PartRange
    digest: str
    unpacked_bytes: int
    content: bytes


def cache_check_wanted(place: CachePlace, key: str, *, now: datetime) -> None:
    """Raises Conflict if there is one already. Raises TooEarly if its cell does not serve yet, or its node uploaded
    another one a moment ago."""
    if cache_find(place, key) is not None:
        raise Conflict("this fleet has a compile cache for it already")
    if not place.is_serving:
        raise TooEarly("only a cell that serves may upload its compile cache")
    if CompileCache.objects.filter(node=place.node, created_at__gt=now - ONE_OF_A_NODE_EVERY).exists():
        raise TooEarly("this node uploaded another compile cache a moment ago")


def cache_part_store(place: CachePlace, part: CachePart, *, now: datetime) -> int:
    """Store a part and return the byte that must follow; with the last one, the cache. Raises Conflict, TooEarly,
    TooLarge or BadUpload."""
    cache_check_wanted(place, part.key, now=now)
    if len(part.content) != part.range.last - part.range.first + 1 or not is_sha256(part.digest):
        raise BadUpload("the part has another length than its Content-Range, or no SHA-256")
    folder = Path(settings.COMPILE_CACHES) / UNFINISHED
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = folder / hashlib.sha256(f"{place.node} {part.key}".encode()).hexdigest()
    with unfinished.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TooEarly("another part of this upload is being stored") from None
        if part.range.first == 0:
            _check_room(folder, part.range.total)
            file.truncate(0)
        size = os.fstat(file.fileno()).st_size
        if size != part.range.first:
            return size
        file.write(part.content)
        file.flush()
        if part.range.last + 1 < part.range.total:
            return part.range.last + 1
        try:
            _finish(place, part, unfinished, now)
        finally:
            unfinished.unlink(missing_ok=True)
    return part.range.total


def cache_use(row: CompileCache, *, now: datetime) -> None:
    """Note that a node fetched it."""
    CompileCache.objects.filter(pk=row.pk, used_at__lte=now - NOTE_USE_EVERY).update(used_at=now)
    CompileCache.objects.filter(pk=row.pk).update(uses=F("uses") + 1)


def cache_delete(*, id: int, actor: str, now: datetime) -> None:
    """Delete a cache. Nodes that have a copy keep it; the next one without a copy compiles and uploads another."""
    with transaction.atomic():
        row = CompileCache.objects.select_related("version").select_for_update().get(pk=id)
        _remove(row, f"deleted by {actor}", actor, now)


def _check_room(folder: Path, total: int) -> None:
    most = most_bytes_of_one(cache_room_bytes())
    if total > most:
        raise TooLarge(f"it has {size_words(total)}; the limit is {size_words(most)}")
    known, coming = set(CompileCache.objects.values_list("digest", flat=True)), 0
    for other in (*folder.iterdir(), *(path for path in folder.parent.iterdir() if is_sha256(path.name))):
        with contextlib.suppress(FileNotFoundError):
            found = other.stat()
            is_stored = other.parent == folder.parent and f"{DIGEST_PREFIX}{other.name}" in known
            if not is_stored and time.time() - found.st_mtime > STALE_S:
                other.unlink()
            elif not is_stored:
                coming += found.st_size
    free = shutil.disk_usage(folder).free
    if coming + total > cache_room_bytes() or total + RESERVE_BYTES > free:
        raise TooLarge(f"there is no room for {size_words(total)} now")


def _finish(place: CachePlace, part: CachePart, unfinished: Path, now: datetime) -> None:
    with unfinished.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != part.digest:
        raise BadUpload(f"the archive has the digest {found}, but its sender stated {part.digest}")
    unfinished.replace(cache_path(part.digest))
    try:
        with transaction.atomic():
            row = CompileCache.objects.create(
                version_id=place.version,
                instance_type=place.instance_type,
                rank=place.rank,
                key=part.key,
                digest=f"{DIGEST_PREFIX}{part.digest}",
                packed_bytes=part.range.total,
                unpacked_bytes=part.unpacked_bytes,
                node=place.node,
                cell=place.cell,
                used_at=now,
                created_at=now,
            )
            _make_room(row, now)
            _record(row, "added", f"uploaded by {place.node} of {place.cell}", "fleet", now)
    except IntegrityError:
        _delete_file(f"{DIGEST_PREFIX}{part.digest}")
        raise Conflict("this fleet has a compile cache for it already") from None


def _make_room(new: CompileCache, now: datetime) -> None:
    rows = {row.pk: row for row in CompileCache.objects.select_related("version").select_for_update(of=("self",))}
    stored = {pk: _stored(row) for pk, row in rows.items()}
    for pk in plan_removals(stored.pop(new.pk), stored.values(), cache_room_bytes()):
        _remove(rows[pk], "removed to make room", "fleet", now)


def _stored(row: CompileCache) -> StoredCache:
    return StoredCache(
        id=row.pk,
        version=row.version_id,
        instance_type=row.instance_type,
        rank=row.rank,
        bytes=row.packed_bytes,
        used_at=row.used_at,
        is_retired=row.version.state == VersionState.RETIRED.value,
    )


def _remove(row: CompileCache, why: str, actor: str, now: datetime) -> None:
    _record(row, "deleted", why, actor, now)
    digest = row.digest
    row.delete()
    transaction.on_commit(lambda: _delete_file(digest))


def _delete_file(digest: str) -> None:
    if not CompileCache.objects.filter(digest=digest).exists():
        cache_path(digest).unlink(missing_ok=True)


def _record(row: CompileCache, what: str, why: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"compile_cache.{what}",
        message=f"compile cache of {row} ({size_words(row.packed_bytes)}) {why}",
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        detail={
            "version": row.version.reference,
            "instance_type": row.instance_type,
            "rank": row.rank,
            "digest": row.digest,
            "node": row.node,
            "cell": row.cell,
        },
    )
    live.push("models", row.version.reference)
