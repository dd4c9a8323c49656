"""Keeps the weights that a spare node has fetched in its machine's page cache, so that an engine that starts there
reads them from memory. The kernel drops these pages before it refuses memory to any process: nothing here is a
reservation. A thread reads; errors mean only that the weights are not in memory."""

import contextlib
import ctypes
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from engine_agent.node.checks.deep import available_memory_bytes

LEAST_FREE_SHARE = 0.5
"""Of the available memory: engines of other nodes of the machine may start at any time."""
CHECK_EVERY_S = 60.0
WINDOW_BYTES = 1 << 30
CHUNK_BYTES = 4 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class PageCache:
    """Of one node. `available` returns bytes of memory that can be used without swapping."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        available: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self._now_s, self._available = now_s, available
        self._bytes: dict[str, int] = {}
        self._wanted: tuple[str, ...] = ()
        self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def keep(self, folders: Mapping[str, Path]) -> None:
        """Starts to read these folders, by digest and the most important first, as far as memory allows; checks again
        after a while. An empty mapping stops it."""
        wanted = tuple(folders)
        if wanted != self._wanted:
            self._wanted, self._due_s = wanted, 0.0
            self._bytes = {digest: held for digest, held in self._bytes.items() if digest in folders}
        if not folders or self._now_s() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = self._now_s() + CHECK_EVERY_S
        self._thread = threading.Thread(target=self._read, args=(dict(folders),), name="page cache", daemon=True)
        self._thread.start()

    def bytes_in_memory(self, digest: str) -> int:
        return self._bytes.get(digest, 0)

    def wait(self) -> None:
        """Returns when nothing is being read."""
        if self._thread is not None:
            self._thread.join()

    def _read(self, folders: Mapping[str, Path]) -> None:
        room = int(self._available() * (1 - LEAST_FREE_SHARE))
        for digest, folder in folders.items():
            files = list(own_files(folder))
            whole = sum(size for _, size in files)
            held = _resident(files)
            if whole <= room:
                room -= whole
                if held < whole:
                    for path, _ in files:
                        self._read_file(path, digest)
                    held = _resident(files)
            if digest in self._wanted:
                self._bytes[digest] = held

    def _read_file(self, path: Path, digest: str) -> None:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            buffer = bytearray(CHUNK_BYTES)
            while digest in self._wanted and file.readinto(buffer):
                pass


def own_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Regular files of a folder with their sizes, without those of other accounts: mincore(2) reports all of their
    pages as resident."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and os.geteuid() in (0, found.st_uid):
                    yield path, found.st_size


def _resident(files: list[tuple[Path, int]]) -> int:
    total = 0
    for path, size in files:
        with contextlib.suppress(OSError, ValueError):
            total += resident_bytes(path, size)
    return total


def resident_bytes(path: Path, size: int) -> int:
    """Bytes of a file that are in the page cache, by mincore(2). Reads none of them. Raises OSError or ValueError if
    the file is gone or became shorter."""
    pages = 0
    with path.open("rb") as file:
        for start in range(0, size, WINDOW_BYTES):
            length = min(WINDOW_BYTES, size - start)
            with mmap.mmap(
                file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start
            ) as view:
                flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
                first = ctypes.c_char.from_buffer(view)
                failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), flags)
                del first  # or the mapping cannot be closed
                if failed:
                    raise OSError(ctypes.get_errno(), f"mincore: {path}")
                pages += bytes(flags).translate(_FIRST_BITS).count(1)
    return min(size, pages * mmap.PAGESIZE)


_FIRST_BITS = bytes(byte & 1 for byte in range(256))
