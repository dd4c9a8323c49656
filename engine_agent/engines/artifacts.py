"""Artifacts on disk: folders of model files under a manifest, and the machine's cache of those from S3.

An artifact in the cache is an entry named by its whole digest: `<hex>` once it is complete, `<hex>.partial` during the
download, next to `<hex>.lock`. Readers share an entry's lock; a process that fills or removes the entry holds it
exclusively. The launcher becomes the engine and keeps its lock until it exits. Imports only the standard library,
because launchers import it in the engine's Python, and opens no socket."""

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
    """Returns the manifest of a folder's current content; reads every file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return Manifest({path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}, source)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_NAME).write_text(manifest_text(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, and no other file. Raises BadArtifact if there is none, it is not a manifest, or
    its digest does not match its list of files."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise BadArtifact(f"{folder} is not an artifact: it has no {MANIFEST_NAME}") from None
    return parse_manifest(text, str(path))


def verify_folder(folder: Path, expected_digest: str | None = None) -> Manifest:
    """Checks every file against the manifest, and the manifest against `expected_digest` if given. Raises BadArtifact
    if a file is missing, changed or not listed, or this is not the expected artifact."""
    listed = read_manifest(folder)
    if expected_digest is not None and listed.digest != expected_digest:
        raise BadArtifact(f"{folder} holds {listed.digest}, but {expected_digest} was requested")
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusively(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `lock`. Calls `on_wait` once if another process holds it, then waits without a limit. The
    kernel releases the lock when its process exits, however that happens. The holder limits its own work."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_artifact(
    cache: Path, name: str, source: Mapping[str, str], write: Callable[[Path], None], say: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Returns folder and manifest of the artifact `name` from this source; calls `write` with a new folder unless the
    cache has it undamaged. Raises what `write` raises."""
    artifacts = cache / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    with exclusively(artifacts / f".{name}.lock", lambda: say(f"waiting for another process that builds {name} …")):
        for folder in sorted(artifacts.glob(f"{name}-*")):
            manifest = _verified_manifest(folder, source, say)
            if manifest is not None:
                say(f"{name} is in the cache, verified")
                return folder, manifest
        return _build_anew(artifacts, name, source, write, say)


def _verified_manifest(folder: Path, source: Mapping[str, str], say: Callable[[str], None]) -> Manifest | None:
    try:
        if read_manifest(folder).source != source:
            return None
        manifest = verify_folder(folder)
    except BadArtifact as error:
        say(f"{error}; building it again")
        shutil.rmtree(folder)
        return None
    _make_readable(folder)
    return manifest


def _make_readable(folder: Path) -> None:
    """Whatever the umask: engines run as other accounts, and no content is secret."""
    for path, mode in ((folder, 0o755), *((path, 0o644) for path in folder.iterdir())):
        if path.stat().st_mode & mode != mode:
            path.chmod(mode)


def _build_anew(
    artifacts: Path,
    name: str,
    source: Mapping[str, str],
    write: Callable[[Path], None],
    say: Callable[[str], None],
) -> tuple[Path, Manifest]:
    started = time.monotonic()
    say(f"building {name} …")
    unfinished = artifacts / f".unfinished-{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        write(unfinished)
        manifest = describe_folder(unfinished, source)
        write_manifest(unfinished, manifest)
        _make_readable(unfinished)
        folder = artifacts / f"{name}-{manifest.digest.removeprefix(DIGEST_PREFIX)[:12]}"
        shutil.rmtree(folder, ignore_errors=True)  # the same bytes from another source or revision
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    say(f"built in {time.monotonic() - started:.0f} s: {folder}")
    return folder, manifest


FREE_RESERVE_BYTES = 1024**3
"""Disk space that a download leaves free for logs and journals."""
LIMIT_VARIABLE = "SWITCHYARD_ARTIFACT_CACHE_GIB"
ACQUIRE_TRIES = 5
"""How often an artifact may disappear again before it is locked."""
POLL_S = 0.1
"""Interval between checks of an entry that another process fills."""
ROOM_LOCK = "room.lock"
GONE = ".gone-"


class CannotFetch(Exception):
    """The artifact did not arrive. The text names the object or folder, the cause and the remedy."""


class Entry:
    """The paths of one artifact in the cache."""

    def __init__(self, cache: Path, hex_digest: str) -> None:
        self.cache = cache
        self.hex_digest = hex_digest
        self.folder = cache / hex_digest
        self.partial = cache / f"{hex_digest}.partial"
        """An unfinished download: complete files in `files`, incomplete ones in `parts`, the total size in `total`."""
        self.lock = cache / f"{hex_digest}.lock"
        """Shared by readers or held by one writer; its modification time is the time of last use."""
        self.damaged = cache / f"{hex_digest}.damaged"
        """Exists while a file of the folder is known to be wrong."""

    @property
    def is_complete(self) -> bool:
        """Whether an engine may try to load it."""
        return self.folder.is_dir() and not self.damaged.exists()


def entry_of(digest: str, cache: Path) -> Entry:
    """Returns the entry for an artifact's digest. Raises ValueError if the digest is not `sha256:<64 hexadecimal
    digits>`, so it must not become a path."""
    hex_digest = digest.removeprefix(DIGEST_PREFIX)
    if not digest.startswith(DIGEST_PREFIX) or not is_sha256(hex_digest):
        raise ValueError(
            f"{digest[:80]!r} is not the digest of an artifact; it must be sha256: and 64 hexadecimal digits"
        )
    return Entry(cache, hex_digest)


def mark_damaged(folder: Path) -> None:
    """Records that a folder does not match its manifest, so that the next start repairs it. Does nothing for folders
    outside a cache."""
    if folder.with_name(f"{folder.name}.lock").exists():
        with contextlib.suppress(OSError):
            folder.with_name(f"{folder.name}.damaged").touch()


def acquire(entry: Entry, fill: Callable[[], None], on_wait: Callable[[], None]) -> int:
    """Returns the descriptor of a shared lock on the complete artifact. The lock lasts until the descriptor is closed.

    `fill` is called by one process at a time if the entry is incomplete. `on_wait` is called before each wait for
    another process, at most once per try. Raises CannotFetch if `fill` failed, or other processes removed the entry
    repeatedly. Raises OSError if the cache cannot be written."""
    entry.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(ACQUIRE_TRIES):
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
    raise CannotFetch(
        f"{entry.folder} was removed {ACQUIRE_TRIES} times before it could be read: the cache is too small"
    )


def make_room(entry: Entry, total: int, limit: int | None) -> None:
    """Makes room for `total` bytes of this artifact, including those already downloaded. Removes the least recently
    used entries that are not in use, but none if that would not suffice. The caller holds the entry's lock exclusively.
    Raises CannotFetch if the disk or the cache's `limit` is too small. Raises OSError if the cache cannot be
    written."""
    with exclusively(entry.cache / ROOM_LOCK, lambda: None):
        for left in entry.cache.glob(f"{GONE}*"):
            shutil.rmtree(left, ignore_errors=True)
        (entry.partial / "total").write_text(str(total))
        with contextlib.ExitStack() as locks:
            others = [_inspect(other, locks) for other in _entries(entry.cache) if other.folder != entry.folder]
            shortage = _Shortage(entry, total, limit, others)
            chosen: list[_OtherEntry] = []
            for other in sorted(others, key=lambda other: other.used_at_s):
                if shortage.bytes > 0 and other.is_free:
                    chosen.append(other)
                    shortage.without(other)
            if shortage.bytes > 0:
                raise CannotFetch(shortage.reason())
            for other in chosen:
                _remove(other.entry)


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def size_limit(stated: str) -> int | None:
    """Returns the maximum size of the cache in bytes, from `SWITCHYARD_ARTIFACT_CACHE_GIB`; None means no limit. Raises
    CannotFetch if the value is not a number of GiB."""
    if not stated:
        return None
    if not stated.isdecimal() or not stated.isascii() or not 0 < len(stated) <= 9 or int(stated) == 0:
        raise CannotFetch(f"{LIMIT_VARIABLE} is {stated[:40]!r}; it must be a whole number of GiB above 0, or unset")
    return int(stated) * 1024**3


@dataclass(frozen=True)
class _OtherEntry:
    """Another entry. `to_come`: bytes that its running download has not written yet."""

    entry: Entry
    bytes: int
    to_come: int
    used_at_s: float
    is_free: bool


class _Shortage:
    """The bytes by which an artifact exceeds the disk or the limit."""

    def __init__(self, entry: Entry, total: int, limit: int | None, others: list[_OtherEntry]) -> None:
        self._entry, self._total, self._limit = entry, total, limit
        self._missing = max(0, total - bytes_in(entry.partial))
        self._free = shutil.disk_usage(entry.cache).free - sum(other.to_come for other in others)
        self._used = sum(other.bytes + other.to_come for other in others)

    def without(self, other: _OtherEntry) -> None:
        self._free += other.bytes
        self._used -= other.bytes

    @property
    def bytes(self) -> int:
        """0 or less if it fits."""
        beyond_disk = self._missing + FREE_RESERVE_BYTES - self._free
        return beyond_disk if self._limit is None else max(beyond_disk, self._used + self._total - self._limit)

    def reason(self) -> str:
        if self._limit is not None and self._used + self._total > self._limit:
            return (
                f"the artifact has {self._total / 1e9:.1f} GB and the cache may have {self._limit / 1e9:.1f} GB, of "
                f"which {self._used / 1e9:.1f} GB are in use: raise {LIMIT_VARIABLE}"
            )
        return (
            f"the disk of {self._entry.cache} has room for {max(0, self._free) / 1e9:.1f} GB and the artifact needs "
            f"{(self._missing + FREE_RESERVE_BYTES) / 1e9:.1f} GB more with reserve: free space; artifacts in use are "
            f"never removed"
        )


def _inspect(entry: Entry, locks: contextlib.ExitStack) -> _OtherEntry:
    """Returns the entry, locked by `locks` if no process uses it."""
    present = bytes_in(entry.folder) + bytes_in(entry.partial)
    descriptor = os.open(entry.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locks.callback(os.close, descriptor)
    if _lock_now(descriptor, fcntl.LOCK_EX):
        return _OtherEntry(entry, present, 0, os.fstat(descriptor).st_mtime, is_free=True)
    os.utime(descriptor)  # in use now, so it must not be the next to be evicted
    to_come = 0 if entry.folder.is_dir() else max(0, total_of(entry) - present)
    return _OtherEntry(entry, present, to_come, time.time(), is_free=False)


def total_of(entry: Entry) -> int:
    try:
        text = (entry.partial / "total").read_text()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def _entries(cache: Path) -> Iterator[Entry]:
    found = {path.name.partition(".")[0] for path in cache.iterdir()}
    return (Entry(cache, name) for name in sorted(found) if is_sha256(name))


def _remove(entry: Entry) -> None:
    """Renames an entry, then deletes its files. The caller holds its lock exclusively."""
    for path in (entry.folder, entry.partial):
        if path.is_dir():
            aside = entry.cache / f"{GONE}{path.name}"
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    entry.damaged.unlink(missing_ok=True)
    entry.lock.unlink(missing_ok=True)


def _take_damaged(entry: Entry) -> None:
    """Turns a damaged folder into an unfinished download, which keeps its correct files."""
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
    """Waits until the lock is acquired or the entry is complete, which makes an exclusive lock unnecessary. The process
    that filled it may take its shared lock before a waiting one wakes: the kernel would then block until its engine
    exits."""
    while not _lock_now(descriptor, wanted):
        if wanted == fcntl.LOCK_EX and entry.is_complete:
            return
        time.sleep(POLL_S)


def _is_current(descriptor: int) -> bool:
    """Whether the lock file still exists: the process that removes an entry also removes its lock."""
    return os.fstat(descriptor).st_nlink > 0
