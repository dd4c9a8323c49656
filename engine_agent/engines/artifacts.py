"""Artifacts on disk: folders of model files under a manifest, and the machine's cache of those from S3.

An artifact in the cache is an entry named by its whole digest: `<hex>` once it is complete, `<hex>.partial` during the
download, next to `<hex>.lock`. Readers share an entry's lock; a process that fills or removes the entry holds it
exclusively. The launcher becomes the engine and keeps its lock until it exits. Imports only the standard library,
because launchers import it in the engine's Python, and opens no socket.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_agent.protocol.manifest import (
    DIGEST_PREFIX,
    MANIFEST_NAME,
    BadArtifact,
    Manifest,
    is_sha256,
    manifest_text,
    parse_manifest,
)


def describe_folder(folder: Path, source: Mapping[str, str]) -> Manifest:
    """The manifest of a folder as it is now; reads every file in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return Manifest({path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}, source)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the folder."""
    (folder / MANIFEST_NAME).write_text(manifest_text(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, without looking at the other files.

    Raises:
        BadArtifact: there is none, or it is not a manifest, or its own digest does not fit its list of files.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise BadArtifact(f"{folder} is no artifact: it has no {MANIFEST_NAME}") from None
    return parse_manifest(text, str(path))


def verify_folder(folder: Path, expected_digest: str | None = None) -> Manifest:
    """Check every file against the manifest, and the manifest against `expected_digest` if given.

    Raises:
        BadArtifact: a file is missing, changed or not listed, or it is another artifact than the expected one.
    """
    listed = read_manifest(folder)
    if expected_digest is not None and listed.digest != expected_digest:
        raise BadArtifact(f"{folder} holds {listed.digest}, but {expected_digest} was asked for")
    actual = describe_folder(folder, listed.source)
    for path in sorted(listed.files.keys() | actual.files.keys()):
        if path not in actual.files:
            raise BadArtifact(f"{folder / path} is missing")
        if path not in listed.files:
            raise BadArtifact(f"{folder / path} is not in {MANIFEST_NAME}")
        if actual.files[path] != listed.files[path]:
            raise BadArtifact(
                f"{folder / path} is corrupt: sha256 {actual.files[path]}, {MANIFEST_NAME} has {listed.files[path]}"
            )
    return listed


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusively(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `lock`; calls `on_wait` once if another process holds it, then waits for its end.

    There is no time limit: the kernel drops the lock with the process that holds it, however that ends, and whoever
    holds it limits its own work.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


FREE_RESERVE_BYTES = 1024**3
"""What a download leaves free on the disk for logs and journals."""
LIMIT_VARIABLE = "SWITCHYARD_ARTIFACT_CACHE_GIB"
HOLD_TRIES = 5
"""How often an artifact may be gone again before it could be held."""
LOOK_EVERY_S = 0.1
"""At an entry that somebody else fills."""
ROOM_LOCK = "room.lock"
GONE = ".gone-"


class CannotFetch(Exception):
    """The artifact did not come; the text names the object or folder, what is wrong and what would help."""


@dataclass(frozen=True)
class Entry:
    """Where one artifact of the cache lies."""

    cache: Path
    hex_digest: str

    @property
    def folder(self) -> Path:
        return self.cache / self.hex_digest

    @property
    def partial(self) -> Path:
        """What has come so far: `files` whole ones, `parts` beginnings, `total` how many bytes there will be."""
        return self.cache / f"{self.hex_digest}.partial"

    @property
    def lock(self) -> Path:
        """Held by readers together or by one writer; its time of change is the last use."""
        return self.cache / f"{self.hex_digest}.lock"

    @property
    def damaged(self) -> Path:
        """Is there while a file of the folder is known to be another than it should be."""
        return self.cache / f"{self.hex_digest}.damaged"

    @property
    def is_complete(self) -> bool:
        """Whether an engine may try to load it."""
        return self.folder.is_dir() and not self.damaged.exists()


def entry_of(digest: str, cache: Path) -> Entry:
    """The entry of an artifact's digest.

    Raises:
        ValueError: the digest is no `sha256:<64 hexadecimal digits>`, and must become no path.
    """
    hex_digest = digest.removeprefix(DIGEST_PREFIX)
    if not digest.startswith(DIGEST_PREFIX) or not is_sha256(hex_digest):
        raise ValueError(f"{digest[:80]!r} is no digest of an artifact; it must be sha256: and 64 hexadecimal digits")
    return Entry(cache, hex_digest)


def mark_damaged(folder: Path) -> None:
    """Note that a folder is not the artifact it should be. The next start repairs it if it is one of a cache; of any
    other folder nothing is noted."""
    if folder.with_name(f"{folder.name}.lock").exists():
        with contextlib.suppress(OSError):
            folder.with_name(f"{folder.name}.damaged").touch()


def hold(entry: Entry, fill: Callable[[], None], on_wait: Callable[[], None]) -> int:
    """Have the artifact, and the lock that keeps it; returns the lock's descriptor, which is to stay open.

    `fill` is called by one process at a time, if the entry is not complete; `on_wait` before each wait for another, at
    most one a try.

    Raises:
        CannotFetch: from `fill`, or others removed it again and again.
        OSError: the cache cannot be written.
    """
    entry.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(HOLD_TRIES):
        wanted = fcntl.LOCK_SH if entry.is_complete else fcntl.LOCK_EX
        descriptor = os.open(entry.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock_now(descriptor, wanted):
                on_wait()
                _wait_for(entry, descriptor, wanted)
            if not _is_current(descriptor):
                continue
            if wanted == fcntl.LOCK_SH and entry.is_complete:
                os.utime(descriptor)
                kept, descriptor = descriptor, -1
                return kept
            if wanted == fcntl.LOCK_EX and not entry.is_complete and _lock_now(descriptor, wanted):
                _take_damaged(entry)
                fill()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    raise CannotFetch(f"{entry.folder} was removed {HOLD_TRIES} times before it could be read: the cache is too small")


def make_room(entry: Entry, total: int, limit: int | None) -> None:
    """Let `total` bytes of this artifact have room, of which some may be there; removes what was used longest ago and
    is not in use, and nothing at all if that does not suffice. The caller holds the entry's lock alone.

    Raises:
        CannotFetch: the disk or the cache's `limit` is too small.
        OSError: the cache cannot be written.
    """
    with exclusively(entry.cache / ROOM_LOCK, lambda: None):
        for left in entry.cache.glob(f"{GONE}*"):
            shutil.rmtree(left, ignore_errors=True)
        (entry.partial / "total").write_text(str(total))
        with contextlib.ExitStack() as locks:
            others = [_look_at(other, locks) for other in _entries(entry.cache) if other != entry]
            shortage = _Shortage(entry, total, limit, others)
            chosen: list[_Other] = []
            for other in sorted(others, key=lambda other: other.used_at_s):
                if shortage.bytes > 0 and other.is_free:
                    chosen.append(other)
                    shortage.without(other)
            if shortage.bytes > 0:
                raise CannotFetch(shortage.reason())
            for other in chosen:
                _remove(other.entry)


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder; files that go away meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def size_limit(stated: str) -> int | None:
    """Bytes that the cache may have, from `SWITCHYARD_ARTIFACT_CACHE_GIB`; None: as much as the disk.

    Raises:
        CannotFetch: it is no number of GiB.
    """
    if not stated:
        return None
    if not stated.isdecimal() or not stated.isascii() or not 0 < len(stated) <= 9 or int(stated) == 0:
        raise CannotFetch(f"{LIMIT_VARIABLE} is {stated[:40]!r}; it must be a whole number of GiB above 0, or unset")
    return int(stated) * 1024**3


@dataclass(frozen=True)
class _Other:
    """Another entry as it is now. `to_come`: bytes that a download that runs has yet to write."""

    entry: Entry
    bytes: int
    to_come: int
    used_at_s: float
    is_free: bool


class _Shortage:
    """By how many bytes an artifact does not fit, on the disk or in the limit."""

    def __init__(self, entry: Entry, total: int, limit: int | None, others: list[_Other]) -> None:
        self._entry, self._total, self._limit = entry, total, limit
        self._missing = max(0, total - bytes_in(entry.partial))
        self._free = shutil.disk_usage(entry.cache).free - sum(other.to_come for other in others)
        self._used = sum(other.bytes + other.to_come for other in others)

    def without(self, other: _Other) -> None:
        self._free += other.bytes
        self._used -= other.bytes

    @property
    def bytes(self) -> int:
        """0 or less: it fits."""
        beyond_disk = self._missing + FREE_RESERVE_BYTES - self._free
        return beyond_disk if self._limit is None else max(beyond_disk, self._used + self._total - self._limit)

    def reason(self) -> str:
        """Why it does not fit, what is in use left alone."""
        if self._limit is not None and self._used + self._total > self._limit:
            return (
                f"the artifact has {self._total / 1e9:.1f} GB and the cache may have {self._limit / 1e9:.1f} GB, of "
                f"which {self._used / 1e9:.1f} GB are in use: raise {LIMIT_VARIABLE}"
            )
        return (
            f"the disk of {self._entry.cache} has room for {max(0, self._free) / 1e9:.1f} GB and the artifact needs "
            f"{(self._missing + FREE_RESERVE_BYTES) / 1e9:.1f} GB more with reserve: make room; what engines read is "
            f"never removed"
        )


def _look_at(entry: Entry, locks: contextlib.ExitStack) -> _Other:
    """The entry, locked by `locks` if nobody uses it."""
    present = bytes_in(entry.folder) + bytes_in(entry.partial)
    descriptor = os.open(entry.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locks.callback(os.close, descriptor)
    if _lock_now(descriptor, fcntl.LOCK_EX):
        return _Other(entry, present, 0, os.fstat(descriptor).st_mtime, is_free=True)
    os.utime(descriptor)  # it is used now, which its next eviction should know
    to_come = 0 if entry.folder.is_dir() else max(0, total_of(entry) - present)
    return _Other(entry, present, to_come, time.time(), is_free=False)


def total_of(entry: Entry) -> int:
    """How many bytes a download will have brought; 0 while that is not known."""
    try:
        text = (entry.partial / "total").read_text()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def _entries(cache: Path) -> Iterator[Entry]:
    found = {path.name.partition(".")[0] for path in cache.iterdir()}
    return (Entry(cache, name) for name in sorted(found) if is_sha256(name))


def _remove(entry: Entry) -> None:
    """Take an entry away at once, and then its files; the caller holds its lock alone."""
    for path in (entry.folder, entry.partial):
        if path.is_dir():
            aside = entry.cache / f"{GONE}{path.name}"
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    entry.damaged.unlink(missing_ok=True)
    entry.lock.unlink(missing_ok=True)


def _take_damaged(entry: Entry) -> None:
    """Make a damaged folder the beginning of a download, which keeps what is right of it."""
    if entry.damaged.exists():
        if entry.folder.is_dir():
            shutil.rmtree(entry.partial, ignore_errors=True)
            entry.partial.mkdir(mode=0o700)
            entry.folder.rename(entry.partial / "files")
        entry.damaged.unlink(missing_ok=True)


def _lock_now(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(entry: Entry, descriptor: int, wanted: int) -> None:
    """Until the lock is ours, or the entry complete, which needs no lock alone. Whoever filled it may have taken the
    lock that it keeps before anybody who waited was woken: the kernel would have us wait until its engine ends."""
    while not _lock_now(descriptor, wanted):
        if wanted == fcntl.LOCK_EX and entry.is_complete:
            return
        time.sleep(LOOK_EVERY_S)


def _is_current(descriptor: int) -> bool:
    """Whether the lock file is still in the folder: who removes an entry removes it, too."""
    return os.fstat(descriptor).st_nlink > 0
