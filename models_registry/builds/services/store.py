"""Where uploaded builds are stored: in a folder or bucket, by digest, the manifest last. Parts of an unfinished build
count as nothing. Calls other systems, so never inside a transaction."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from django.conf import settings

from engine_agent.protocol.manifest import DIGEST_PREFIX, MANIFEST_NAME, BadArtifact, Manifest, is_sha256, manifest_text
from kernel.refusals import Conflict
from models_registry.artifacts.planner import Place
from models_registry.artifacts.services.bucket import BucketPrefix
from models_registry.artifacts.services.sources import SourceTrouble
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.imports.planner import CannotImport
from models_registry.imports.services.imports import import_store
from models_registry.imports.services.store import RESERVE_BYTES, make_folder, sync_path

BUILDS, UNFINISHED = "builds", ".uploads"
"""Folders of the store: complete builds by digest, and unfinished ones in a folder."""
ARRIVING = ".arriving-"
"""Prefix of files that receive a part, next to the unfinished builds, so that none is part of a build."""
ORPHAN_S = 24 * 3600.0

log = logging.getLogger(__name__)


class BuildPlace(Protocol):
    """The place of one build. Calls raise BadArtifact for permanent errors, SourceTrouble for transient ones, and
    OSError if a disk refuses."""

    uri: str
    arriving: Path
    """Folder for the file of a part that arrives."""

    def is_complete(self) -> bool: ...

    def room(self) -> int | None:
        """Free bytes for parts; None if the store has no limit. Calls no other system."""

    def put(self, name: str, file: Path, sha256: str) -> None:
        """Store a verified file."""

    def finish(self, manifest: Manifest) -> None:
        """Store the manifest, which completes the build. Raises BadArtifact if a file of it is missing."""

    def remove(self, *, is_named: bool) -> None:
        """Delete the files of an unfinished build, and of a complete one unless a build of the fleet names it."""


class FolderPlace:
    def __init__(self, root: Path, hex_digest: str) -> None:
        self.arriving = root / UNFINISHED
        self._folder, self._unfinished = root / BUILDS / hex_digest, self.arriving / hex_digest
        self.uri = self._folder.as_uri()

    def is_complete(self) -> bool:
        return (self._folder / MANIFEST_NAME).is_file()

    def room(self) -> int | None:
        make_folder(self.arriving)
        return max(0, shutil.disk_usage(self.arriving).free - RESERVE_BYTES)

    def put(self, name: str, file: Path, sha256: str) -> None:
        file.chmod(0o644)  # agents on this host run as other users
        sync_path(file)
        self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.replace(self._unfinished / name)

    def finish(self, manifest: Manifest) -> None:
        missing = [name for name in manifest.files if not (self._unfinished / name).is_file()]
        if missing:
            raise BadArtifact(f"{self._unfinished / missing[0]} is missing")
        written = self._unfinished / MANIFEST_NAME
        written.write_text(manifest_text(manifest))
        written.chmod(0o644)
        sync_path(written)
        sync_path(self._unfinished)
        make_folder(self._folder.parent)
        self._unfinished.chmod(0o755)
        self._unfinished.rename(self._folder)
        sync_path(self._folder.parent)

    def remove(self, *, is_named: bool) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        if not is_named:
            with suppress(FileNotFoundError):
                make_folder(self.arriving)
                self._folder.rename(self._unfinished)  # no longer complete, even if this process is killed now
            shutil.rmtree(self._unfinished, ignore_errors=True)


class BucketPlace:
    def __init__(self, root: Place, hex_digest: str) -> None:
        self._place = Place(root.scheme, root.host, f"{root.path}/{BUILDS}/{hex_digest}".lstrip("/"))
        self.uri = str(self._place)
        self.arriving = Path(settings.SWITCHYARD_HOME) / UNFINISHED

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
        if missing := sorted(manifest.files.keys() - {name for name, _ in self._prefix.names()}):
            raise BadArtifact(f"{self.uri}/{missing[0]} is missing")
        self._prefix.finish(manifest_text(manifest).encode())

    def remove(self, *, is_named: bool) -> None:
        found = {name for name, _ in self._prefix.names()}
        if MANIFEST_NAME not in found or not is_named:
            for name in sorted(found, key=lambda name: (name != MANIFEST_NAME, name)):  # first it is no longer complete
                self._prefix.remove(name)


def build_place(digest: str) -> BuildPlace:
    """Raises Conflict if no store is configured."""
    root, hex_digest = build_store(), digest.removeprefix(DIGEST_PREFIX)
    return BucketPlace(root, hex_digest) if root.scheme == "s3" else FolderPlace(Path(root.path), hex_digest)


def build_store() -> Place:
    """Raises Conflict if no store is configured."""
    try:
        return import_store()
    except CannotImport as error:
        raise Conflict(f"builds cannot be uploaded: {error}") from None


def files_remove(digest: str, uri: str = "") -> None:
    """Delete the files of a build that no upload and no row of a build needs any more. `uri`: only if they are stored
    there. Files that cannot be deleted are logged."""
    try:
        place = build_place(digest)
        if (uri and place.uri != uri) or EngineBuildUpload.objects.filter(digest=digest).exists():
            return
        place.remove(is_named=EngineBuild.objects.filter(uri=place.uri).exists())
    except (Conflict, BadArtifact, SourceTrouble, OSError) as error:
        log.warning("files of build %s were not deleted: %s", digest, error)


def orphans_find(root: Place) -> Iterator[str]:
    """Digests of unfinished builds that have not changed for a day. Deletes files of parts that stopped arriving."""
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
            with suppress(FileNotFoundError):  # another host deletes them as well
                if staged.stat().st_mtime >= oldest_s:
                    continue
                if is_sha256(staged.name):
                    yield staged.name
                elif staged.name.startswith(ARRIVING):
                    staged.unlink()
