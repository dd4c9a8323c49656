"""Stores compile caches that nodes upload in parts, and deletes them. A cache is code that engines execute: only a node
that serves in a cell of the version may add one, for its own rank and instance type, and none replaces another."""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F

from engine_agent.protocol.compile_caches import PartRange
from engine_agent.protocol.manifest import DIGEST_PREFIX, BadArtifact, is_sha256
from kernel import live
from kernel.events import event_record
from kernel.outside_transaction import run_outside_transaction
from kernel.refusals import Conflict, Refusal
from kernel.tones import Tone
from models_registry.artifacts.planner import parse_place, size_words
from models_registry.artifacts.services.bucket import BucketPrefix
from models_registry.artifacts.services.sources import SourceTrouble
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.planner import StoredCache, most_bytes_of_one, plan_removals
from models_registry.compile_caches.selectors import (
    CachePlace,
    cache_find,
    cache_folder,
    cache_path,
    cache_room_bytes,
    is_in_bucket,
)
from models_registry.versions.planning.lifecycle import VersionState

UNFINISHED = ".parts"
STALE_S = 3600.0
"""After which an unfinished upload, or an archive without a row, is deleted."""
RESERVE_BYTES = 1024**3
"""Disk space that uploads leave free."""
ONE_OF_A_NODE_EVERY = timedelta(minutes=1)
"""Each upload writes events; a node starts one engine in this time."""
NOTE_USE_EVERY = timedelta(seconds=10)

log = logging.getLogger(__name__)


class TooEarly(Refusal):
    """The cell does not serve yet."""


class TooLarge(Refusal):
    """There is no room for the cache."""


class BadUpload(Refusal):
    """The parts are not what their sender states."""


@dataclass(frozen=True, slots=True)
class CacheArchive:
    """What a node uploads, as it states. `digest`: SHA-256 in hexadecimal."""

    key: str
    packed_bytes: int
    digest: str
    unpacked_bytes: int


def cache_check_wanted(place: CachePlace, key: str, *, now: datetime) -> None:
    """Raises Conflict if there is one already. Raises TooEarly if its cell does not serve yet, or its node uploaded
    another one a moment ago."""
    if cache_find(place, key) is not None:
        raise Conflict("this fleet has a compile cache for it already")
    if not place.is_serving:
        raise TooEarly("only a cell that serves may upload its compile cache")
    if CompileCache.objects.filter(node=place.node, created_at__gt=now - ONE_OF_A_NODE_EVERY).exists():
        raise TooEarly("this node uploaded another compile cache a moment ago")


def cache_part_store(
    place: CachePlace, archive: CacheArchive, part: PartRange, content: bytes, *, now: datetime
) -> int:
    """Store a part and return the byte that must follow. Raises Conflict, TooEarly, TooLarge or BadUpload."""
    cache_check_wanted(place, archive.key, now=now)
    if len(content) != part.last - part.first + 1 or not is_sha256(archive.digest):
        raise BadUpload("the part has another length than its Content-Range, or no SHA-256")
    if part.total > (most := most_bytes_of_one(cache_room_bytes())):
        raise TooLarge(f"it has {size_words(part.total)}; the limit is {size_words(most)}")
    with _uploaded(place, archive.key) as file:
        if part.first == 0:
            file.truncate(0)
            _check_room(Path(file.name), part.total)
        size = os.fstat(file.fileno()).st_size
        if size != part.first:
            return size
        file.write(content)
    return part.last + 1


def cache_finish(place: CachePlace, archive: CacheArchive, *, now: datetime) -> int:
    """Add the cache whose parts have arrived, and return their bytes; another number if that part must follow first.
    Raises Conflict, TooEarly or BadUpload."""
    cache_check_wanted(place, archive.key, now=now)
    if not is_sha256(archive.digest):
        raise BadUpload("it has no SHA-256")
    following = run_outside_transaction(("cache", archive.digest), lambda: _archive_store(place, archive))
    if following == archive.packed_bytes:
        _add(place, archive, now)
    return following


def cache_bucket() -> BucketPrefix | None:
    """Where archives are instead, if a bucket is configured."""
    return BucketPrefix(parse_place(settings.COMPILE_CACHES)) if is_in_bucket() else None


def cache_open(digest: str) -> tuple[IO[bytes], int] | None:
    """An archive and its length; None if it is gone. Raises BadArtifact or SourceTrouble if the bucket does not send
    it."""
    if (bucket := cache_bucket()) is not None:
        return bucket.open(digest.removeprefix(DIGEST_PREFIX))
    try:
        file = cache_path(digest).open("rb")
    except FileNotFoundError:
        return None
    return file, os.fstat(file.fileno()).st_size


def cache_use(row: CompileCache, *, now: datetime) -> None:
    """Note that a node fetched it."""
    CompileCache.objects.filter(pk=row.pk, used_at__lte=now - NOTE_USE_EVERY).update(used_at=now)
    CompileCache.objects.filter(pk=row.pk).update(uses=F("uses") + 1)


def cache_delete(*, id: int, actor: str, now: datetime) -> None:
    """Delete a cache. Nodes that have a copy keep it; the next one without a copy compiles and uploads another."""
    with transaction.atomic():
        row = CompileCache.objects.select_related("version").select_for_update().get(pk=id)
        _remove(row, f"deleted by {actor}", actor, now)


def _check_room(unfinished: Path, total: int) -> None:
    folder = unfinished.parent
    known, coming = set(CompileCache.objects.values_list("digest", flat=True)), 0
    for other in (*folder.iterdir(), *(path for path in folder.parent.iterdir() if is_sha256(path.name))):
        with contextlib.suppress(FileNotFoundError):
            found = other.stat()
            is_stored = other.parent == folder.parent and f"{DIGEST_PREFIX}{other.name}" in known
            if not is_stored and other != unfinished and time.time() - found.st_mtime > STALE_S:
                other.unlink()
            elif not is_stored:
                coming += found.st_size
    free = shutil.disk_usage(folder).free
    if coming + total > cache_room_bytes() or total + RESERVE_BYTES > free:
        raise TooLarge(f"there is no room for {size_words(total)} now")


@contextlib.contextmanager
def _uploaded(place: CachePlace, key: str) -> Iterator[IO[bytes]]:
    """The file of an upload, locked and at its end. Raises TooEarly if another request has it."""
    folder = cache_folder() / UNFINISHED
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / hashlib.sha256(f"{place.node} {key}".encode()).hexdigest()).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TooEarly("another part of this upload is being stored") from None
        yield file


def _archive_store(place: CachePlace, archive: CacheArchive) -> int:
    """Moves a complete upload to its place. It has no row yet."""
    with _uploaded(place, archive.key) as file:
        path, size = Path(file.name), os.fstat(file.fileno()).st_size
        if not size:
            path.unlink()
        if size != archive.packed_bytes:
            return size if size < archive.packed_bytes else 0
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != archive.digest:
            path.unlink()
            raise BadUpload(f"the archive has the digest {found}, but its sender stated {archive.digest}")
        if (bucket := cache_bucket()) is None:
            path.replace(cache_path(archive.digest))
            return size
        try:
            bucket.upload(path, archive.digest, archive.digest, size)
            _delete_unknown(bucket, new=archive.digest)
        except BadArtifact as error:
            raise Conflict(f"it cannot be stored: {error}") from None
        except SourceTrouble as error:
            raise TooEarly(str(error)) from None
        path.unlink()
        return size


def _delete_unknown(bucket: BucketPrefix, new: str) -> None:
    """Deletes objects without a row: those of uploads that failed, and those that could not be deleted with theirs."""
    known = {f"{DIGEST_PREFIX}{new}", *CompileCache.objects.values_list("digest", flat=True)}
    for name, written_at in bucket.names():
        if is_sha256(name) and f"{DIGEST_PREFIX}{name}" not in known and time.time() - written_at > STALE_S:
            bucket.remove(name)


def _add(place: CachePlace, archive: CacheArchive, now: datetime) -> None:
    try:
        with transaction.atomic():
            row = CompileCache.objects.create(
                version_id=place.version,
                instance_type=place.instance_type,
                rank=place.rank,
                key=archive.key,
                digest=f"{DIGEST_PREFIX}{archive.digest}",
                packed_bytes=archive.packed_bytes,
                unpacked_bytes=archive.unpacked_bytes,
                node=place.node,
                cell=place.cell,
                used_at=now,
                created_at=now,
            )
            _make_room(row, now)
            _record(row, "added", f"uploaded by {place.node} of {place.cell}", "fleet", now)
    except IntegrityError:
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
    if CompileCache.objects.filter(digest=digest).exists():
        return
    cache_path(digest).unlink(missing_ok=True)
    try:
        if (bucket := cache_bucket()) is not None:
            bucket.remove(digest.removeprefix(DIGEST_PREFIX))
    except (BadArtifact, SourceTrouble) as error:
        log.warning("a deleted compile cache is left in its bucket: %s", error)


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
