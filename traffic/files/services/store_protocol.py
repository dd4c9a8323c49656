"""Contract of file stores, and the choice of one by configuration. Names are the control plane's own, such as
`files/file-…`; a committed file is whole and durable, and each name is written once."""

from collections.abc import Iterator
from typing import BinaryIO, Protocol

READ_BYTES = 256 * 1024
Piece = bytes
"""Alias for annotations in classes whose attribute `bytes` is a number."""


class StoreAway(Exception):
    """The store cannot be read or written now; the text says why."""


class NoSuchFile(Exception):
    """No file has this name."""


class FileWriter(Protocol):
    """An upload in progress. `bytes` and `sha256` are those so far."""

    @property
    def bytes(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    def write(self, piece: Piece) -> None: ...

    def commit(self) -> None:
        """Makes the file whole, durable and visible, atomically."""

    def abort(self) -> None:
        """Discards the upload; no effect after a commit."""


class JournalWriter(Protocol):
    """A file that grows by whole appends. After a failed append, which may be partly stored, do not use it again."""

    def append(self, piece: bytes) -> None:
        """Appends a piece, which then survives a crash of the host. Raises StoreAway if the piece may be stored in
        part, or appear later."""

    def close(self) -> None: ...


class FileStore(Protocol):
    """A file store. All methods may raise `StoreAway`."""

    sync_every_s: float
    """Interval of appends to a journal; lines since the last one are sent again after a crash."""

    def write(self, name: str) -> FileWriter:
        """Starts a file, which is invisible until commit."""

    def append(self, name: str) -> JournalWriter: ...

    def journal(self, name: str) -> Iterator[bytes]:
        """Yields the lines of a journal; none if it is empty."""

    def open(self, name: str, start: int = 0) -> BinaryIO:
        """Opens a file for sequential reading from a byte before its end. Raises NoSuchFile if it does not exist."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Reads bytes from `start` up to `end`. Raises NoSuchFile if it does not exist."""

    def delete(self, name: str) -> None:
        """Deletes a file, if it exists."""

    def delete_folder(self, name: str) -> None:
        """Deletes everything below a folder, if it exists."""

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        """Yields files and folders in a folder: name and time of the last write in Unix seconds."""

    def folders(self, folder: str) -> Iterator[str]:
        """Yields the names of folders in a folder. Unlike `names`, it lists nothing below them."""

    def delete_unfinished(self, before: float) -> int:
        """Deletes files that were started before this time and never committed. Returns their number."""


def pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(READ_BYTES):
        yield piece
