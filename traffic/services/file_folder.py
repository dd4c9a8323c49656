"""Files and batches in a folder that every host of the control plane shares: a file is written beside its place,
synchronised and renamed; a journal is appended to and synchronised."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from traffic.services.file_protocol import FileWriter, JournalWriter, NoSuchFile, StoreAway

_UNFINISHED = "unfinished"


class FolderStore:
    """Whatever its disk says no to is `StoreAway`."""

    sync_every_s = 0.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str) -> FileWriter:
        unfinished = self._folder / _UNFINISHED / uuid4().hex
        with _as_away():
            unfinished.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FolderWriter(unfinished, self._path(name))

    def append(self, name: str) -> JournalWriter:
        path = self._path(name)
        with _as_away():
            _make_folder(path.parent)
            return FolderJournal(path)

    def journal(self, name: str) -> Iterator[bytes]:
        try:
            file = self.open(name)
        except NoSuchFile:
            return
        with file, _as_away():
            yield from file

    def open(self, name: str) -> BinaryIO:
        with _as_away():
            return self._path(name).open("rb")

    def local(self, name: str) -> BinaryIO:
        return self.open(name)

    def read(self, name: str, start: int, end: int) -> bytes:
        with self.open(name) as file, _as_away():
            file.seek(start)
            return file.read(end - start)

    def delete(self, name: str) -> None:
        with _as_away(), suppress(FileNotFoundError):
            self._path(name).unlink()

    def delete_folder(self, name: str) -> None:
        with _as_away(), suppress(FileNotFoundError):
            shutil.rmtree(self._path(name))

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        with _as_away(), suppress(FileNotFoundError), os.scandir(self._path(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield f"{folder}/{entry.name}", entry.stat().st_mtime

    def delete_unfinished(self, before: float) -> int:
        left = [name for name, written_at in self.names(_UNFINISHED) if written_at < before]
        for name in left:
            self.delete(name)
        return len(left)

    def _path(self, name: str) -> Path:
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise ValueError(f"{name!r} is outside the store")
        return path


class FolderWriter:
    """A file beside its place until it is whole."""

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
        with _as_away():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _make_folder(self._path.parent)
            self._unfinished.replace(self._path)
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._unfinished.unlink()


class FolderJournal:
    """A file that is only ever appended to."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_new:
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        with _as_away():
            left = memoryview(piece)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


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
