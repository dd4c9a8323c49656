"""Receives builds in parts. Each part is verified and its piece of the archive checked before it is stored, and nothing
is unpacked. The row states which part must follow, so an interrupted upload continues there, on any control host."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from django.conf import settings
from django.db import IntegrityError, connection, transaction

from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    MOST_PART_BYTES,
    BadBuild,
    BuildFacts,
    parse_facts,
    part_names,
)
from engine_agent.protocol.manifest import DIGEST_PREFIX, BadArtifact, Manifest, is_sha256
from kernel import live
from kernel.events import event_record
from kernel.outside_transaction import run_outside_transaction
from kernel.refusals import Busy, Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.artifacts.planner import size_words
from models_registry.artifacts.services.sources import SourceTrouble
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.builds.planner import ArchiveWalk
from models_registry.builds.services.builds import build_insert, build_read
from models_registry.builds.services.store import (
    ARRIVING,
    BuildPlace,
    build_place,
    build_store,
    files_remove,
    orphans_find,
)

MOST_OPEN = 8
KEPT = timedelta(days=1)
"""After which an upload without a new part is deleted."""
CHUNK_BYTES = 1024 * 1024
RETRY_S = 3.0
_LOCK = 0x53575550
"""Key of PostgreSQL's advisory lock for the start of uploads: "SWUP"."""

log = logging.getLogger(__name__)


def upload_start(*, name: str, facts: str, digests: list[str], actor: str, now: datetime) -> EngineBuildUpload:
    """Begin an upload, or return the one with this name and content, to continue it. `facts`: text of `build.json`.
    Raises InvalidInput for facts or digests that no build has. Raises Conflict if the name is taken, the same content
    is on its way under another name, too many uploads are open, or the disk is too small."""
    stated = _stated(facts, digests)
    digest = _manifest(stated, facts, digests).digest
    if EngineBuild.objects.filter(name=name).exists():
        raise Conflict(f"build {name} exists already; builds never change, so choose another name")
    if (row := _same_upload(name, digest)) is not None:
        return row
    place = build_place(digest)
    try:
        is_complete = run_outside_transaction("upload", place.is_complete)
    except (BadArtifact, SourceTrouble, OSError) as error:
        raise Conflict(f"builds cannot be uploaded: {error}") from None
    done = {"parts_done": stated.parts, "bytes_done": stated.packed_bytes} if is_complete else {}
    with transaction.atomic():
        with connection.cursor() as cursor:  # parallel starts count each other
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if (row := _same_upload(name, digest)) is not None:
            return row
        _check_room(place, 0 if is_complete else stated.packed_bytes)
        try:
            row = EngineBuildUpload.objects.create(
                name=name,
                digest=digest,
                facts=facts,
                digests=digests,
                parts=stated.parts,
                packed_bytes=stated.packed_bytes,
                walk=ArchiveWalk.start(stated).stored(),
                actor=actor,
                created_at=now,
                touched_at=now,
                **done,
            )
        except IntegrityError:
            raise Conflict("this content is being uploaded under another name") from None
        _record(row, "started", f"started by {actor}", actor, now)
    return row


def upload_part_store(*, name: str, number: int, chunks: Iterable[bytes], now: datetime) -> EngineBuildUpload:
    """Verify and store a part; a part that is stored already is ignored. Raises Conflict if another part must follow.
    Raises InvalidInput for a part with another digest. A part that cannot belong to a build raises InvalidInput and
    ends the upload. Raises Busy if the store does not answer. Call it outside a transaction."""
    row = _upload(name)
    if number < row.parts_done:
        return row
    if number > row.parts_done or number >= row.parts:
        raise Conflict(f"part {row.parts_done} of {row.parts} must follow, not part {number}")
    place, walk = build_place(row.digest), ArchiveWalk.load(row.walk)
    try:
        with _arriving_file(place) as file:
            size = _receive(chunks, file, row.digests[number])
            with file.open("rb") as content:
                _check(row, walk, content, size)
            place.put(part_names(parse_facts(row.facts, name))[number], file, row.digests[number])
    except BadBuild as error:
        _remove(row, "refused", str(error), now)
        raise InvalidInput(field="part", rule="build", message=f"{error}; the upload was deleted") from None
    except SourceTrouble as error:
        raise Busy(str(error), RETRY_S) from None
    except (BadArtifact, OSError) as error:
        raise Conflict(f"part {number} was not stored: {error}") from None
    columns = {"parts_done": number + 1, "bytes_done": row.bytes_done + size, "walk": walk.stored(), "touched_at": now}
    EngineBuildUpload.objects.filter(pk=row.pk, parts_done=number).update(**columns)
    if (present := EngineBuildUpload.objects.filter(pk=row.pk).first()) is None:
        files_remove(row.digest)
        raise Conflict(f"the upload of {name} was completed or deleted meanwhile")
    live.push("builds", name)
    return present


def upload_finish(*, name: str, actor: str, now: datetime) -> EngineBuild:
    """Complete an upload and add its build. Raises Conflict if parts are missing, or the store refuses."""
    row = _upload(name)
    if row.parts_done < row.parts:
        raise Conflict(f"part {row.parts_done} of {row.parts} must follow")
    place = build_place(row.digest)
    try:
        run_outside_transaction("upload", lambda: _complete(row, place))
    except (BadArtifact, SourceTrouble, OSError) as error:
        raise Conflict(f"the upload of {name} was not completed: {error}; try again, or delete it") from None
    digest, facts = build_read(place.uri, row.digest)
    with transaction.atomic():
        if not EngineBuildUpload.objects.filter(pk=row.pk).delete()[0]:
            raise Conflict(f"the upload of {name} was completed or deleted meanwhile")
        return build_insert(name=name, uri=place.uri, digest=digest, facts=facts, actor=actor, now=now)


def upload_delete(*, name: str, actor: str, now: datetime) -> None:
    """Delete an upload and its files."""
    _remove(_upload(name), "deleted", f"deleted by {actor}", now, actor)


def uploads_trim(*, now: datetime) -> int:
    """Delete uploads without a new part for a day, and files without an upload. Returns the number of both."""
    ended = 0
    for row in EngineBuildUpload.objects.filter(touched_at__lt=now - KEPT):
        ended += _remove(row, "abandoned", "no part arrived for a day", now, touched_at=row.touched_at)
    try:
        orphans = list(orphans_find(build_store()))
    except (Conflict, BadArtifact, SourceTrouble, OSError) as error:
        log.warning("files of uploads cannot be listed: %s", error)
        return ended
    known = {
        digest.removeprefix(DIGEST_PREFIX) for digest in EngineBuildUpload.objects.values_list("digest", flat=True)
    }
    for hex_digest in sorted(set(orphans) - known):
        files_remove(f"{DIGEST_PREFIX}{hex_digest}")
        ended += 1
    return ended


def _upload(name: str) -> EngineBuildUpload:
    row = EngineBuildUpload.objects.filter(name=name).first()
    if row is None:
        raise Conflict(f"the upload of {name} was completed or deleted meanwhile")
    return row


def _same_upload(name: str, digest: str) -> EngineBuildUpload | None:
    """Raises Conflict if there is one with this name and other content."""
    row = EngineBuildUpload.objects.filter(name=name).first()
    if row is not None and row.digest != digest:
        raise Conflict(f"another build is being uploaded as {name}; delete that upload or choose another name")
    return row


def _stated(facts: str, digests: list[str]) -> BuildFacts:
    try:
        stated = parse_facts(facts, BUILD_FILE)
    except BadBuild as error:
        raise InvalidInput(field="facts", rule="build", message=str(error)) from None
    if len(digests) != stated.parts or not all(map(is_sha256, digests)):
        message = f"there must be {stated.parts} digests of 64 hexadecimal digits, one for each part"
        raise InvalidInput(field="digests", rule="build", message=message)
    most = settings.ARTIFACT_MAX_GIB * 1024**3
    if stated.packed_bytes > min(most - len(facts), stated.parts * MOST_PART_BYTES):
        message = (
            f"{stated.parts} parts cannot have {size_words(stated.packed_bytes)}; one has at most "
            f"{size_words(MOST_PART_BYTES)}, and all of them {size_words(most)} (SWITCHYARD_ARTIFACT_MAX_GIB)"
        )
        raise InvalidInput(field="facts", rule="size", message=message)
    return stated


def _manifest(stated: BuildFacts, facts: str, digests: list[str]) -> Manifest:
    files = {
        BUILD_FILE: hashlib.sha256(facts.encode()).hexdigest(),
        **dict(zip(part_names(stated), digests, strict=True)),
    }
    source = {"engine": stated.serves, "version": stated.version, "platform": stated.platform}
    return Manifest(files, source)


def _check_room(place: BuildPlace, needed: int) -> None:
    """Raises Conflict if too many uploads are open, or the disk has no room for this one and the rest of the others."""
    others = list(EngineBuildUpload.objects.values_list("packed_bytes", "bytes_done"))
    if len(others) >= MOST_OPEN:
        raise Conflict(f"{MOST_OPEN} uploads are open; finish or delete one")
    try:
        free = place.room()
    except OSError as error:
        raise Conflict(f"builds cannot be uploaded: {error}") from None
    coming = sum(total - done for total, done in others)
    if free is not None and needed and needed + coming > free:
        raise Conflict(
            f"the build has {size_words(needed)}, other uploads need {size_words(coming)}, and the disk of "
            f"{place.arriving} has room for {size_words(free)}: free space, or delete an upload"
        )


@contextmanager
def _arriving_file(place: BuildPlace) -> Iterator[Path]:
    place.arriving.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.arriving, prefix=ARRIVING)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _receive(chunks: Iterable[bytes], file: Path, sha256: str) -> int:
    """Write a part to disk; returns its size. Raises InvalidInput if it is too long or has another digest."""
    digest, size = hashlib.sha256(), 0
    with file.open("wb") as written:
        for chunk in chunks:
            size += len(chunk)
            if size > MOST_PART_BYTES:
                message = f"the part has more than {MOST_PART_BYTES} bytes"
                raise InvalidInput(field="part", rule="size", message=message)
            digest.update(chunk)
            written.write(chunk)
    if (found := digest.hexdigest()) != sha256:
        message = f"the part has the digest {found}, but the upload lists {sha256}; send it again"
        raise InvalidInput(field="part", rule="digest", message=message)
    return size


def _check(row: EngineBuildUpload, walk: ArchiveWalk, content: BinaryIO, size: int) -> None:
    """Raises BadBuild if the part cannot belong to the build."""
    walk.read_part(iter(lambda: content.read(CHUNK_BYTES), b""))
    total, is_last = row.bytes_done + size, row.parts_done + 1 == row.parts
    if is_last:
        walk.finish()
    if total > row.packed_bytes or (is_last and total != row.packed_bytes):
        raise BadBuild(f"the parts have {total} bytes; {BUILD_FILE} says {row.packed_bytes}")


def _complete(row: EngineBuildUpload, place: BuildPlace) -> None:
    if place.is_complete():
        return
    manifest = _manifest(parse_facts(row.facts, row.name), row.facts, row.digests)
    with _arriving_file(place) as file:
        file.write_bytes(row.facts.encode())
        place.put(BUILD_FILE, file, manifest.files[BUILD_FILE])
    place.finish(manifest)


def _remove(row: EngineBuildUpload, what: str, why: str, now: datetime, actor: str = "fleet", **seen: datetime) -> bool:
    """The row first: a part that is being stored then finds none, and deletes its file. Returns False if the row is no
    longer as it was seen."""
    with transaction.atomic():
        if is_removed := bool(EngineBuildUpload.objects.filter(pk=row.pk, **seen).delete()[0]):
            _record(row, what, why, actor, now)
            transaction.on_commit(lambda: files_remove(row.digest))
    return is_removed


def _record(row: EngineBuildUpload, what: str, why: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"engine_build.upload_{what}",
        message=f"upload of engine build {row.name} ({size_words(row.packed_bytes)}) {what}: {why}"[:1000],
        tone=Tone.BAD if what == "refused" else Tone.IDLE,
        now=now,
        actor=actor,
        detail={"build": row.name, "digest": row.digest, "parts": row.parts, "parts_done": row.parts_done},
    )
    live.push("builds", row.name)
