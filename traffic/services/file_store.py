"""Where the bytes of files and batches lie: a folder that every host of the control plane shares. Names are ours alone,
such as `files/file-…`; what is committed is whole and on the disk, and a name is written once.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from django.conf import settings

READ_BYTES = 256 * 1024
_UNFINISHED = "unfinished"


class StoreAway(Exception):
    """The store cannot be read or written now; the text says why."""


class NoSuchFile(Exception):
    """Nothing of that name is there."""


class FileStore:
    """A folder. Whatever its disk says no to is `StoreAway`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str) -> "FileWriter":
        """A new file, which nobody sees until it is committed."""
        unfinished = self._folder / _UNFINISHED / uuid4().hex
        with _as_away():
            unfinished.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FileWriter(unfinished, self._path(name))

    def append(self, name: str) -> "JournalWriter":
        """A file that grows; every reader sees what was appended."""
        path = self._path(name)
        with _as_away():
            _make_folder(path.parent)
            return JournalWriter(path)

    def open(self, name: str) -> BinaryIO:
        """
        Raises:
            NoSuchFile, StoreAway: see there.
        """
        with _as_away():
            return self._path(name).open("rb")

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`."""
        with self.open(name) as file, _as_away():
            file.seek(start)
            return file.read(end - start)

    def delete(self, name: str) -> None:
        """Delete a file, or all below a folder; that there is none is no fault."""
        path = self._path(name)
        with _as_away(), suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        """What is in a folder: the name and when it was written, in seconds since 1970."""
        with _as_away(), suppress(FileNotFoundError), os.scandir(self._path(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield f"{folder}/{entry.name}", entry.stat().st_mtime

    def unfinished(self) -> Iterator[tuple[str, float]]:
        """Files that were begun and never committed, as `names`."""
        return self.names(_UNFINISHED)

    def _path(self, name: str) -> Path:
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise ValueError(f"{name!r} is outside the store")
        return path


class FileWriter:
    """One file on its way into the store. `bytes` and `sha256` are those so far."""

    def __init__(self, unfinished: Path, path: Path) -> None:
        self._unfinished, self._path = unfinished, path
        self._file = unfinished.open("xb")
        self._digest = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, piece: bytes) -> None:
        with _as_away():
            self._file.write(piece)
        self._digest.update(piece)
        self.bytes += len(piece)

    def commit(self) -> None:
        """Make it whole, on the disk and visible, in one step."""
        with _as_away():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _make_folder(self._path.parent)
            self._unfinished.replace(self._path)
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        """Leave nothing; after a commit it does nothing."""
        self._file.close()
        with suppress(OSError):
            self._unfinished.unlink()


class JournalWriter:
    """A file that grows by whole appends. One that failed may be there in part: then it is not used again."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_new:
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        """Add to the end. Once this has returned, the piece survives a crash of the host.

        Raises:
            StoreAway: it may be there in part.
        """
        with _as_away():
            left = memoryview(piece)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def file_store() -> FileStore:
    """The one of this installation."""
    return FileStore(settings.FILES_FOLDER)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """What is left of an open file, in pieces."""
    while piece := file.read(READ_BYTES):
        yield piece


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _as_away:  # noqa: N801 - reads as a statement
    """What a disk or a network file system says no to, in one kind of exception."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise NoSuchFile(str(error.filename)) from error
        if isinstance(error, OSError):
            raise StoreAway(f"the file store cannot be used: {error.strerror or error}") from error
