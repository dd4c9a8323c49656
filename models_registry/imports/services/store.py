"""Stores imported files as an artifact: in a folder, which appears complete under its name, or under a prefix of a
bucket, the manifest last. Unfinished files are in a staging folder, which one process at a time holds."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from django.conf import settings

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, manifest_text, parse_manifest
from models_registry.artifacts.planner import ArtifactLimits, Place, size_words
from models_registry.artifacts.services.bucket import BucketPrefix
from models_registry.artifacts.services.sources import ArtifactSource, BucketSource, FolderSource
from models_registry.imports.models import ModelImport
from models_registry.imports.planner import CannotImport, artifact_path

RESERVE_BYTES = 1024**3
"""Disk space that an import leaves free."""
UNFINISHED = ".imports"


class Staging:
    """The unfinished files of one import."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self._parts = folder, folder / "files", folder / "parts"

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Yields whether this process holds the folder, which a stopped or paused one may still do."""
        self._parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = os.fstat(lock.fileno()).st_nlink > 0
            except BlockingIOError:
                is_held = False
            yield is_held

    def part(self, path: str) -> Path:
        return self._parts / hashlib.sha256(path.encode()).hexdigest()

    def part_bytes(self, path: str) -> int:
        part = self.part(path)
        return part.stat().st_size if part.exists() else 0

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_room(self, needed: int) -> None:
        """Raises CannotImport if the disk has too little free space."""
        free = shutil.disk_usage(self.folder).free
        if needed + RESERVE_BYTES > free:
            raise CannotImport(
                f"the disk of {self.folder.parent} has {size_words(free)} free, but the import needs "
                f"{size_words(needed)} and a reserve of {size_words(RESERVE_BYTES)}: free space and retry"
            )


class ImportStore(Protocol):
    """Where an import's artifact goes. Calls raise BadArtifact for permanent errors and SourceTrouble for transient
    ones."""

    uri: str
    staging: Staging
    keeps_staged: bool
    """Whether stored files take space on the staging folder's disk."""

    def finished(self) -> Manifest | None:
        """The manifest of the complete artifact, if it exists."""

    def holds(self, path: str, sha256: str, size: int) -> bool: ...

    def is_known(self, path: str, sha256: str) -> bool:
        """Whether a file that was never noted as stored needs no download. `sha256` as listed, or empty."""

    def put(self, path: str, sha256: str, size: int) -> None:
        """Store the completed part of this file."""

    def finish(self, manifest: Manifest) -> None:
        """Complete the artifact."""

    def read(self, path: str, most: int) -> bytes:
        """The beginning of a file of the complete artifact."""


def store_of(row: ModelImport, root: Place) -> ImportStore:
    path = artifact_path(row.repository(), row.revision, row.pattern)
    place = Place(root.scheme, root.host, f"{root.path}/{path}".lstrip("/" if root.scheme == "s3" else ""))
    staging = staging_of(row, root)
    return BucketStore(place, staging) if root.scheme == "s3" else FolderStore(place, root, staging)


def staging_of(row: ModelImport, root: Place) -> Staging:
    """On the disk of the store, or of this host for a bucket."""
    if root.scheme == "s3":
        return Staging(Path(settings.SWITCHYARD_HOME) / UNFINISHED / str(row.pk))
    make_folder(Path(root.path))
    return Staging(Path(root.path) / UNFINISHED / str(row.pk))


class FolderStore:
    keeps_staged = True

    def __init__(self, place: Place, root: Place, staging: Staging) -> None:
        self.uri, self.staging = str(place), staging
        self._place, self._root, self._folder = place, root, Path(place.path)

    def _source(self) -> ArtifactSource:
        return FolderSource(self._place, [self._root], ArtifactLimits())

    def finished(self) -> Manifest | None:
        if not self._folder.exists():
            return None
        return parse_manifest(self._source().manifest(), str(self._folder / MANIFEST_NAME))

    def holds(self, path: str, sha256: str, size: int) -> bool:
        file = self.staging.files / path
        return file.is_file() and file.stat().st_size == size

    def is_known(self, path: str, sha256: str) -> bool:
        """Makes it a part again, which is verified like any other."""
        with suppress(FileNotFoundError):
            (self.staging.files / path).replace(self.staging.part(path))
        return False

    def put(self, path: str, sha256: str, size: int) -> None:
        file = self.staging.files / path
        make_folder(file.parent)
        part = self.staging.part(path)
        part.chmod(0o644)  # agents on this host run as other users
        part.replace(file)

    def finish(self, manifest: Manifest) -> None:
        make_folder(self.staging.files)
        written = self.staging.files / MANIFEST_NAME
        written.write_text(manifest_text(manifest))
        written.chmod(0o644)
        for folder in (self.staging.files, *(path for path in self.staging.files.rglob("*") if path.is_dir())):
            sync_path(folder)
        sync_path(written)
        make_folder(self._folder.parent)
        self.staging.files.rename(self._folder)
        sync_path(self._folder.parent)

    def read(self, path: str, most: int) -> bytes:
        with (self._folder / path).open("rb") as file:
            return file.read(most)


class BucketStore:
    keeps_staged = False

    def __init__(self, place: Place, staging: Staging) -> None:
        self.uri, self.staging = str(place), staging
        self._place, self._prefix = place, BucketPrefix(place)

    def finished(self) -> Manifest | None:
        if not self._prefix.holds(MANIFEST_NAME):
            return None
        return parse_manifest(BucketSource(self._place, ArtifactLimits()).manifest(), f"{self.uri}/{MANIFEST_NAME}")

    def holds(self, path: str, sha256: str, size: int) -> bool:
        return self._prefix.holds(path, sha256)

    def is_known(self, path: str, sha256: str) -> bool:
        return bool(sha256) and self._prefix.holds(path, sha256)

    def put(self, path: str, sha256: str, size: int) -> None:
        part = self.staging.part(path)
        self._prefix.upload(part, path, sha256, size)
        part.unlink()

    def finish(self, manifest: Manifest) -> None:
        self._prefix.finish(manifest_text(manifest).encode())

    def read(self, path: str, most: int) -> bytes:
        text = b""
        for piece in BucketSource(self._place, ArtifactLimits()).chunks(path):
            text += piece
            if len(text) >= most:
                break
        return text[:most]


def check_same(manifest: Manifest, listed: dict[str, str], uri: str) -> None:
    """`listed`: path -> SHA-256 or empty. Raises BadArtifact if the artifact has other files than the import."""
    same = manifest.files.keys() == listed.keys()
    if not same or any(digest and manifest.files[path] != digest for path, digest in listed.items()):
        raise BadArtifact(f"{uri} already has another artifact, and artifacts never change: move it away and retry")


def make_folder(folder: Path) -> None:
    """With its parents, readable by agents on this host, whatever the umask."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
