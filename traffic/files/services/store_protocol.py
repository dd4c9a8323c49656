"""What a store of files and batches promises, whatever keeps the bytes.

Names are ours alone, such as `files/file-…`; what is committed is whole and durable, and a name is written once.
"""

from collections.abc import Iterator
from typing import BinaryIO, Protocol

READ_BYTES = 256 * 1024
Piece = bytes
"""Where `bytes` is how many."""


class StoreAway(Exception):
    """The store cannot be read or written now; the text says why."""


class NoSuchFile(Exception):
    """Nothing of that name is there."""


class FileWriter(Protocol):
    """One file on its way into the store. `bytes` and `sha256` are those so far."""

    @property
    def bytes(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    def write(self, piece: Piece) -> None: ...

    def commit(self) -> None:
        """Make it whole, durable and visible, in one step."""

    def abort(self) -> None:
        """Leave nothing; after a commit it does nothing."""


class JournalWriter(Protocol):
    """A file that grows by whole appends. One that failed may be there in part: then it is not used again."""

    def append(self, piece: bytes) -> None:
        """Add to the end. Once this has returned, the piece survives a crash of the host.

        Raises:
            StoreAway: it may be there in part, or come to be there later.
        """

    def close(self) -> None: ...


class FileStore(Protocol):
    """What a store does. All of it may raise `StoreAway`."""

    sync_every_s: float
    """How often a journal is worth an append; a crash has what came since sent again."""

    def write(self, name: str) -> FileWriter:
        """A new file, which nobody sees until it is committed."""

    def append(self, name: str) -> JournalWriter: ...

    def journal(self, name: str) -> Iterator[bytes]:
        """The lines of a journal; none, if nothing was appended to it."""

    def open(self, name: str) -> BinaryIO:
        """A file to read from its beginning on.

        Raises:
            NoSuchFile: see there.
        """

    def local(self, name: str) -> BinaryIO:
        """The same, to read here and there as well.

        Raises:
            NoSuchFile: see there.
        """

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`.

        Raises:
            NoSuchFile: see there.
        """

    def delete(self, name: str) -> None:
        """Delete a file; that there is none is no fault."""

    def delete_folder(self, name: str) -> None:
        """Delete all below a folder; that there is nothing is no fault."""

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        """Files and folders in a folder: the name and when it, or something in it, was written, in seconds since
        1970."""

    def delete_unfinished(self, before: float) -> int:
        """Remove files that were begun before and never committed. Returns how many."""


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """What is left of an open file, in pieces."""
    while piece := file.read(READ_BYTES):
        yield piece
