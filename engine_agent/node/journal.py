"""The last order of an agent, on disk, so that it works without the control plane. Writes are atomic and durable. A
damaged file is set aside for an operator and never deleted."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class CorruptJournal(ValueError):
    """The file is not a valid record. It was moved to `kept_as`, so the next load finds nothing."""

    def __init__(self, path: Path, reason: str, kept_as: Path) -> None:
        super().__init__(f"{path} is damaged ({reason}); kept as {kept_as.name}, starting without it")
        self.path = path
        self.kept_as = kept_as


class Journal(Generic[T]):
    """One record of type `kind` (anything that msgspec can encode) in one JSON file."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)

    def save(self, record: T) -> None:
        """Replaces the record. Afterwards it survives a crash of the process and of the machine. Raises OSError if the
        disk failed; the earlier record is unchanged."""
        write_durably(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1))

    def load(self) -> T | None:
        """Returns the record, or None if there is none. Raises CorruptJournal if the file is not a record of this type;
        it has been set aside under another name. Raises OSError if the file exists and cannot be read."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptJournal(self._path, str(error), self._set_aside()) from error

    def _set_aside(self) -> Path:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        kept_as = self._path.with_name(f"{self._path.name}.corrupt-{stamp}")
        os.replace(self._path, kept_as)
        return kept_as


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes `content` to `path` by write, fsync and rename, so that a reader sees the complete old or new file. Raises
    OSError if the disk failed; the file at `path` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
