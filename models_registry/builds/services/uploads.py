"""Receives builds in parts. Each part is verified and its piece of the archive checked before it is stored, and nothing
is unpacked. The row states which part must follow, so an interrupted upload continues there, on any control host."""

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Protocol

from django.conf import settings
from django.db import IntegrityError, transaction

from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    MOST_PART_BYTES,
    BadBuild,
    BuildFacts,
    parse_facts,
    part_names,
)
from engine_agent.protocol.manifest import (
    DIGEST_PREFIX,
    MANIFEST_NAME,
    BadArtifact,
    Manifest,
    is_sha256,
    manifest_text,
)
from kernel import live
from kernel.events import event_record
from kernel.outside_transaction import run_outside_transaction
from kernel.refusals import Busy, Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.artifacts.planner import Place, size_words
from models_registry.artifacts.services.bucket import BucketPrefix
from models_registry.artifacts.services.sources import SourceTrouble
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.builds.planner import ArchiveWalk
from models_registry.builds.services.builds import build_add
from models_registry.imports.planner import CannotImport
from models_registry.imports.services.imports import import_store
from models_registry.imports.services.store import RESERVE_BYTES, make_folder, sync_path

BUILDS, UNFINISHED = "builds", ".uploads"
"""Folders of the store: complete builds by digest, and uploads in a folder."""
MOST_OPEN = 8
KEPT = timedelta(days=1)
"""After which an upload without a new part is deleted."""
ORPHAN_S = KEPT.total_seconds()
CHUNK_BYTES = 1024 * 1024
RETRY_S = 3.0

log = logging.getLogger(__name__)


# --- where builds are stored ------------------------------------------------------------------------------------------


class UploadPlace(Protocol):
    """The place of one build. Calls raise BadArtifact for permanent errors, SourceTrouble for transient ones, and
    OSError if a disk refuses."""

    uri: str
    scratch: Path
    """Folder for the file of a part that arrives."""

    def is_complete(self) -> bool: ...

    def room(self) -> int | None:
        """Free bytes for parts; None if the store has no limit."""

    def put(self, name: str, file: Path, sha256: str) -> None:
        """Store a verified file."""

    def finish(self, manifest: Manifest) -> None:
        """Store the manifest, which completes the build."""

    def remove(self) -> None:
        """Delete the files of an unfinished upload."""


class FolderPlace:
    def __init__(self, root: Path, hex_digest: str) -> None:
        self._folder, self.scratch = root / BUILDS / hex_digest, root / UNFINISHED / hex_digest
        self.uri = self._folder.as_uri()

    def is_complete(self) -> bool:
        return (self._folder / MANIFEST_NAME).is_file()

    def room(self) -> int | None:
        make_folder(self.scratch.parent)
        return max(0, shutil.disk_usage(self.scratch.parent).free - RESERVE_BYTES)

    def put(self, name: str, file: Path, sha256: str) -> None:
        file.chmod(0o644)  # agents on this host run as other users
        sync_path(file)
        file.replace(self.scratch / name)

    def finish(self, manifest: Manifest) -> None:
        missing = [name for name in manifest.files if not (self.scratch / name).is_file()]
        if missing:
            raise BadArtifact(f"{self.scratch / missing[0]} is missing")
        for path in self.scratch.iterdir():  # parts that a killed process was receiving
            if path.name not in manifest.files:
                path.unlink()
        written = self.scratch / MANIFEST_NAME
        written.write_text(manifest_text(manifest))
        written.chmod(0o644)
        sync_path(written)
        make_folder(self._folder.parent)
        self.scratch.chmod(0o755)
        self.scratch.rename(self._folder)
        sync_path(self._folder.parent)

    def remove(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


class BucketPlace:
    def __init__(self, root: Place, hex_digest: str) -> None:
        self._place = Place(root.scheme, root.host, f"{root.path}/{BUILDS}/{hex_digest}".lstrip("/"))
        self.uri = str(self._place)
        self.scratch = Path(settings.SWITCHYARD_HOME) / UNFINISHED / hex_digest

    @cached_property
    def _prefix(self) -> BucketPrefix:
        return BucketPrefix(self._place)  # not inside a transaction

    def is_complete(self) -> bool:
        return self._prefix.holds(MANIFEST_NAME)

    def room(self) -> int | None:
        return None

    def put(self, name: str, file: Path, sha256: str) -> None:
        self._prefix.upload(file, name, sha256, file.stat().st_size)

    def finish(self, manifest: Manifest) -> None:
        self._prefix.finish(manifest_text(manifest).encode())
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        found = [name for name, _ in self._prefix.names()]
        for name in found if MANIFEST_NAME not in found else ():
            self._prefix.remove(name)


def _place_of(digest: str) -> UploadPlace:
    """Raises Conflict if no store is configured."""
    root, hex_digest = _store(), digest.removeprefix(DIGEST_PREFIX)
    return BucketPlace(root, hex_digest) if root.scheme == "s3" else FolderPlace(Path(root.path), hex_digest)


def _store() -> Place:
    try:
        return import_store()
    except CannotImport as error:
        raise Conflict(f"builds cannot be uploaded: {error}") from None


# --- uploads ----------------------------------------------------------------------------------------------------------


def upload_start(*, name: str, facts: str, digests: list[str], actor: str, now: datetime) -> EngineBuildUpload:
    """Begin an upload, or return the one with this name and content, to continue it. `facts`: text of `build.json`.
    Raises InvalidInput for facts or digests that no build has. Raises Conflict if the name is taken, the same content
    is on its way under another name, too many uploads are open, or the disk is too small."""
    stated = _stated(facts, digests)
    digest = _manifest(stated, facts, digests).digest
    if EngineBuild.objects.filter(name=name).exists():
        raise Conflict(f"build {name} exists already; builds never change, so choose another name")
    if (row := EngineBuildUpload.objects.filter(name=name).first()) is not None:
        if row.digest != digest:
            raise Conflict(f"another build is being uploaded as {name}; delete that upload or choose another name")
        return row
    place = _place_of(digest)
    try:
        is_complete = run_outside_transaction("upload", place.is_complete)
        _check_room(place, stated)
    except (BadArtifact, SourceTrouble, OSError) as error:
        raise Conflict(f"builds cannot be uploaded: {error}") from None
    done = {"parts_done": stated.parts, "bytes_done": stated.packed_bytes} if is_complete else {}
    try:
        with transaction.atomic():
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
            _record(row, "started", f"started by {actor}", actor, now)
    except IntegrityError:
        raise Conflict("another upload has this name or this content") from None
    return row


def upload_part_store(*, name: str, number: int, chunks: Iterable[bytes], now: datetime) -> EngineBuildUpload:
    """Verify and store a part; a part that is stored already is ignored. Raises Conflict if another part must follow.
    Raises InvalidInput for a part with another digest. A part that cannot belong to a build raises InvalidInput and
    ends the upload. Raises Busy if the store does not answer. Call it outside a transaction."""
    row = EngineBuildUpload.objects.get(name=name)
    if number < row.parts_done:
        return row
    if number > row.parts_done or number >= row.parts:
        raise Conflict(f"part {row.parts_done} of {row.parts} must follow, not part {number}")
    place, walk = _place_of(row.digest), ArchiveWalk.load(row.walk)
    try:
        with _scratch_file(place) as file:
            size = _receive(chunks, file, row.digests[number])
            with file.open("rb") as content:
                _check(row, walk, content, size)
            place.put(part_names(parse_facts(row.facts, name))[number], file, row.digests[number])
    except BadBuild as error:
        _remove(row, place, "refused", str(error), now)
        raise InvalidInput(field="part", rule="build", message=f"{error}; the upload was deleted") from None
    except SourceTrouble as error:
        raise Busy(str(error), RETRY_S) from None
    except (BadArtifact, OSError) as error:
        raise Conflict(f"part {number} was not stored: {error}") from None
    columns = {"parts_done": number + 1, "bytes_done": row.bytes_done + size, "walk": walk.stored(), "touched_at": now}
    stored = EngineBuildUpload.objects.filter(pk=row.pk, parts_done=number).update(**columns)
    if not stored and not EngineBuildUpload.objects.filter(digest=row.digest).exists():
        place.remove()
        raise Conflict(f"the upload of {name} was deleted meanwhile")
    return EngineBuildUpload.objects.get(pk=row.pk)


def upload_finish(*, name: str, actor: str, now: datetime) -> EngineBuild:
    """Complete an upload and add its build. Raises Conflict if parts are missing, or the store refuses."""
    row = EngineBuildUpload.objects.get(name=name)
    if row.parts_done < row.parts:
        raise Conflict(f"part {row.parts_done} of {row.parts} must follow")
    place = _place_of(row.digest)
    try:
        run_outside_transaction("upload", lambda: _complete(row, place))
    except (BadArtifact, SourceTrouble, OSError) as error:
        raise Conflict(f"the upload of {name} was not completed: {error}; try again, or delete it") from None
    build = build_add(name=name, uri=place.uri, digest=row.digest, actor=actor, now=now)
    row.delete()
    live.push("models", name)
    return build


def upload_delete(*, name: str, actor: str, now: datetime) -> None:
    """Delete an upload and its files."""
    row = EngineBuildUpload.objects.get(name=name)
    _remove(row, _place_of(row.digest), "deleted", f"deleted by {actor}", now, actor)


def uploads_trim(*, now: datetime) -> int:
    """Delete uploads without a new part for a day, and files without an upload. Returns the number of both."""
    ended = 0
    for row in EngineBuildUpload.objects.filter(touched_at__lt=now - KEPT):
        _remove(row, _place_of(row.digest), "abandoned", "no part arrived for a day", now)
        ended += 1
    try:
        orphans = list(_orphans(_store()))
    except (Conflict, BadArtifact, SourceTrouble, OSError) as error:
        log.warning("files of uploads cannot be listed: %s", error)
        return ended
    known = {
        digest.removeprefix(DIGEST_PREFIX) for digest in EngineBuildUpload.objects.values_list("digest", flat=True)
    }
    for hex_digest in sorted(set(orphans) - known):
        _remove_files(_place_of(hex_digest))
        ended += 1
    return ended


def _stated(facts: str, digests: list[str]) -> BuildFacts:
    try:
        stated = parse_facts(facts, BUILD_FILE)
    except BadBuild as error:
        raise InvalidInput(field="facts", rule="build", message=str(error)) from None
    if len(digests) != stated.parts or not all(map(is_sha256, digests)):
        message = f"there must be {stated.parts} digests of 64 hexadecimal digits, one for each part"
        raise InvalidInput(field="digests", rule="build", message=message)
    most = settings.ARTIFACT_MAX_GIB * 1024**3
    if stated.packed_bytes > min(most, stated.parts * MOST_PART_BYTES):
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


def _check_room(place: UploadPlace, stated: BuildFacts) -> None:
    """Raises Conflict if too many uploads are open, or the disk has no room for this one and the rest of the others."""
    others = list(EngineBuildUpload.objects.values_list("packed_bytes", "bytes_done"))
    if len(others) >= MOST_OPEN:
        raise Conflict(f"{MOST_OPEN} uploads are open; finish or delete one")
    free, coming = place.room(), sum(total - done for total, done in others)
    if free is not None and stated.packed_bytes + coming > free:
        raise Conflict(
            f"the build has {size_words(stated.packed_bytes)}, other uploads need {size_words(coming)}, and the disk "
            f"of {place.scratch.parent} has room for {size_words(free)}: free space, or delete an upload"
        )


@contextmanager
def _scratch_file(place: UploadPlace) -> Iterator[Path]:
    place.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.scratch, prefix=".arriving-")
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


def _complete(row: EngineBuildUpload, place: UploadPlace) -> None:
    if place.is_complete():
        place.remove()
        return
    manifest = _manifest(parse_facts(row.facts, row.name), row.facts, row.digests)
    with _scratch_file(place) as file:
        file.write_bytes(row.facts.encode())
        place.put(BUILD_FILE, file, manifest.files[BUILD_FILE])
    place.finish(manifest)


def _remove(
    row: EngineBuildUpload, place: UploadPlace, what: str, why: str, now: datetime, actor: str = "fleet"
) -> None:
    """The row first: a part that is being stored then finds none, and deletes its file."""
    with transaction.atomic():
        if EngineBuildUpload.objects.filter(pk=row.pk).delete()[0]:
            _record(row, what, why, actor, now)
        transaction.on_commit(lambda: _remove_files(place))


def _remove_files(place: UploadPlace) -> None:
    try:
        place.remove()
    except (BadArtifact, SourceTrouble, OSError) as error:
        log.warning("files of an upload stay for now: %s", error)


def _orphans(root: Place) -> Iterator[str]:
    """Digests of unfinished builds that have not changed for a day."""
    oldest_s = time.time() - ORPHAN_S
    folders = [Path(settings.SWITCHYARD_HOME) / UNFINISHED]
    if root.scheme == "s3":
        changed: dict[str, float] = {}
        complete = set[str]()
        prefix = BucketPrefix(Place(root.scheme, root.host, f"{root.path}/{BUILDS}".lstrip("/")))
        for path, at_s in prefix.names(deep=True):
            hex_digest, _, name = path.partition("/")
            changed[hex_digest] = max(changed.get(hex_digest, 0.0), at_s)
            if name == MANIFEST_NAME:
                complete.add(hex_digest)
        unfinished = {each: at_s for each, at_s in changed.items() if is_sha256(each) and each not in complete}
        yield from (each for each, at_s in unfinished.items() if at_s < oldest_s)
    else:
        folders.append(Path(root.path) / UNFINISHED)
    for folder in folders:
        for staged in folder.iterdir() if folder.is_dir() else ():
            if is_sha256(staged.name) and staged.stat().st_mtime < oldest_s:
                yield staged.name


def _record(row: EngineBuildUpload, what: str, why: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"engine_build.upload_{what}",
        message=f"upload of engine build {row.name} ({size_words(row.packed_bytes)}) {what}: {why}"[:1000],
        tone=Tone.BAD if what == "refused" else Tone.IDLE,
        now=now,
        actor=actor,
        detail={"build": row.name, "digest": row.digest, "parts": row.parts, "parts_done": row.parts_done},
    )
    live.push("models", row.name)
