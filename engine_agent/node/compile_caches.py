"""Compile caches of one node: fetches the cache of a start from other nodes or the control plane before its engine
starts, and uploads what the engine compiled once it is ready. A cache only saves time: every error here means a start
without one, never a failed start. The agent transfers caches itself, because engines must not have its credential.

A cache is code, so only the control plane states its digest, once it has verified and stored the archive. Nodes give
each other only such archives, from a folder that engines cannot change."""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.engines.artifacts import (
    FREE_RESERVE_BYTES,
    CannotFetch,
    Entry,
    acquire,
    file_sha256,
    make_room,
    mark_damaged,
    size_limit,
)
from engine_agent.engines.artifacts import LIMIT_VARIABLE as WEIGHTS_LIMIT
from engine_agent.engines.base import CompileFolders
from engine_agent.engines.builds.store import entries, hold
from engine_agent.engines.compile_cache import (
    DEFAULT_LIMIT_GIB,
    LIMIT_VARIABLE,
    BadCache,
    PackedCache,
    give_to,
    own_key,
    pack,
    unpack,
)
from engine_agent.node.accounts import Account
from engine_agent.node.downloads import Downloads, Fetch, NotThere
from engine_agent.protocol.compile_caches import (
    ARCHIVE_NAME,
    DIGEST_HEADER,
    MOST_CACHE_BYTES,
    PART_BYTES,
    UNPACKED_HEADER,
    CacheFacts,
)
from engine_agent.protocol.strict_json import strict_loads
from engine_agent.protocol.telemetry_messages import OFFERED_CACHES_MAX, NodeCache

log = logging.getLogger(__name__)

COMPILED = "compiled"
"""Of the machine's cache, next to `fetched`: compile caches, whose folders belong to the engines' account."""
ARCHIVES = "compile-archives"
"""Of the machine's cache: archives of caches that the control plane has stored, for other nodes."""
ARCHIVES_SHARE = 4
"""Archives may have this part of the room for caches: a quarter. The folders have the rest."""
FETCH_LIMIT_S, PEERS_LIMIT_S = 120.0, 60.0
"""Then an engine starts without the cache: compiling may be faster. Other nodes may take half of that time."""
OFFER_EVERY_S, OFFER_LIMIT_S = 5.0, 600.0
"""A cell serves some seconds after its last rank is ready; the control plane accepts a cache only then."""
BODY_BYTES_MAX = 4096
NAME = "the compile cache"


@dataclass(frozen=True, slots=True)
class HeldCache:
    """The folder of one start. `lock` is a descriptor that keeps it while it is open; the caller closes it."""

    folder: Path
    lock: int


@dataclass(slots=True)
class _Start:
    """The cache of the latest start. `words`: what became of it, for reports. `is_used`: its engine was started.
    `was_empty`: its engine compiled into an empty folder."""

    key: str
    entry: Entry
    compiles: CompileFolders
    words: str = "looking for a compile cache"
    digest: str = ""
    bytes: int = 0
    peer_bytes: int = 0
    is_prepared: bool = False
    is_used: bool = False
    was_empty: bool = False


class NodeCaches:
    """`folder` has the caches of engines, next to it are the archives. `account` is the engines' account, None if they
    run as the agent. `on_change` is called from another thread when a start may continue."""

    def __init__(
        self,
        folder: Path,
        node_id: str,
        downloads: Downloads,
        on_change: Callable[[], None],
        account: Account | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._archives = folder.with_name(ARCHIVES)
        self._node_id, self._downloads, self._account = node_id, downloads, account
        self._on_change, self._now_s = on_change, now_s
        self._start: _Start | None = None
        self._closed = threading.Event()

    def prepare(self, key: str, compiles: CompileFolders) -> bool:
        """Returns whether the folder of the next start is prepared; begins that if it is not."""
        start = self._start
        if start is None or start.key != key or start.is_used:
            name = own_key(key, self._node_id) if compiles.is_one_engines else key
            start = self._start = _Start(key, Entry(self.folder, name), compiles)
            self._run(start, self._prepare)
        return start.is_prepared

    def obtain(self) -> HeldCache:
        """Returns the prepared folder for a start. Raises OSError if the disk refused: the engine then starts without
        one."""
        start = self._start
        if start is None or not start.is_prepared:
            raise OSError("no compile cache is prepared")
        start.is_used = True
        lock = hold(start.entry)
        if lock is None:
            raise OSError(f"{start.entry.folder} is missing or being removed")
        _unproven(start.entry).touch()
        return HeldCache(start.entry.folder, lock)

    def is_good(self) -> None:
        """Call when the engine of the latest start became ready, or was stopped on purpose before."""
        if self._start is not None and self._start.is_used:
            with contextlib.suppress(OSError):
                _unproven(self._start.entry).unlink(missing_ok=True)

    def offer(self) -> None:
        """Call when the engine of the latest start became ready, before requests reach it. Only a folder that was empty
        before this start is uploaded: requests to an earlier engine may have changed others."""
        start = self._start
        if start is not None and start.is_used and start.was_empty and not self._closed.is_set():
            self._run(start, self._offer)

    def words(self) -> str:
        """The progress of a start that waits for its cache."""
        return self._start.words if self._start is not None and not self._start.is_prepared else ""

    def report(self) -> tuple[NodeCache, ...]:
        start = self._start
        if start is None:
            return ()
        return (NodeCache(start.key, start.words, start.digest, start.bytes, start.peer_bytes),)

    def offered(self) -> tuple[str, ...]:
        """The archives that other nodes may fetch, by digest."""
        try:
            found = entries(self._archives)
        except FileNotFoundError:
            return ()
        return tuple(entry.hex_digest for entry in found if entry.is_complete)[:OFFERED_CACHES_MAX]

    def close(self) -> None:
        self._closed.set()

    def _run(self, start: _Start, work: Callable[[_Start], None]) -> None:
        def guarded() -> None:
            try:
                work(start)
            except Exception as error:  # a cache must never stop a node
                log.warning("compile cache %s: %s", start.key[:12], error)
                start.words = f"none: {str(error)[:300]}"
            finally:
                start.is_prepared = True
                if not self._closed.is_set():
                    self._on_change()

        threading.Thread(target=guarded, name="compile cache", daemon=True).start()

    # --- before a start -----------------------------------------------------------------------------------------------

    def _prepare(self, start: _Start) -> None:
        entry = start.entry
        entry.cache.mkdir(mode=0o711, parents=True, exist_ok=True)
        lock = _lock_alone(entry)
        if lock is None:
            start.words = "shared with another engine of this machine"
            return
        try:
            if entry.folder.is_dir() and _unproven(entry).exists():
                shutil.rmtree(entry.folder)
                start.words = "compiles anew: the last engine with this cache did not become ready"
            elif entry.folder.is_dir():
                start.words = "kept from an earlier start"
            else:
                self._fetch(start)
        finally:
            start.was_empty = not entry.folder.is_dir()
            entry.folder.mkdir(mode=0o700, exist_ok=True)
            _unproven(entry).unlink(missing_ok=True)
            os.close(lock)

    def _fetch(self, start: _Start) -> None:
        """Fills the folder with the fleet's cache, if there is one."""
        entry, made, until_s = start.entry, start.entry.partial / "made", self._now_s() + FETCH_LIMIT_S
        start.words = "fetching the compile cache"
        entry.partial.mkdir(mode=0o700, exist_ok=True)
        try:
            _make_room(entry, 0, _room())  # removes older ones, also if this engine will compile
            facts = self._facts(start, until_s)
            start.digest, start.bytes = facts.digest, facts.packed_bytes
            _make_room(entry, facts.unpacked_bytes, _room())
            archive = self._archive(start, facts, until_s)
            try:
                self._unpack(Entry(self._archives, facts.digest), made, facts)
            finally:
                os.close(archive)
            made.rename(entry.folder)
            start.words = "fetched from the fleet"
        except NotThere:
            start.words = "compiles: the fleet has no cache for it yet"
        except BadCache as error:
            start.words = f"compiles: the compile cache of the fleet is damaged: {str(error)[:300]}"
        except (CannotFetch, OSError) as error:
            start.words = f"compiles: {str(error)[:300]}"
        finally:
            shutil.rmtree(entry.partial, ignore_errors=True)

    def _facts(self, start: _Start, until_s: float) -> CacheFacts:
        """Asks the control plane. Raises NotThere if the fleet has no cache for this start."""
        stated, fetch = start.entry.partial / "facts", Fetch(start.key, NAME, 0, self._now_s, until_s)
        self._downloads.file(fetch, f"/agents/caches/{start.key}", stated, BODY_BYTES_MAX, attempts=1)
        try:
            return msgspec.json.decode(stated.read_bytes(), type=CacheFacts)
        except msgspec.DecodeError as error:
            raise BadCache(f"its facts are malformed: {error}") from None

    def _archive(self, start: _Start, facts: CacheFacts, until_s: float) -> int:
        """Returns the descriptor of a lock on the archive of a cache, which other nodes or the control plane sent.
        Raises CannotFetch if they did not."""
        kept, peers_until_s = Entry(self._archives, facts.digest), min(until_s, self._now_s() + PEERS_LIMIT_S)
        fetch = Fetch(facts.digest, NAME, 0, self._now_s, until_s, peers_until_s)

        def fill() -> None:
            files = _new_files(kept)
            _make_room(kept, facts.packed_bytes, _limit() // ARCHIVES_SHARE)
            wanted, sizes = {ARCHIVE_NAME: facts.digest}, {ARCHIVE_NAME: facts.packed_bytes}
            self._downloads.files(fetch, f"/agents/caches/{start.key}", files, wanted, sizes, attempts=1)
            _put_in_place(kept)

        try:
            return acquire(kept, fill, lambda: None)
        except NotThere as error:  # its facts were there
            raise CannotFetch(str(error)) from None
        finally:
            start.peer_bytes = fetch.peer_bytes

    def _unpack(self, kept: Entry, made: Path, facts: CacheFacts) -> None:
        """Raises BadCache if the archive is not what the control plane stated."""
        archive = kept.folder / ARCHIVE_NAME
        if (found := file_sha256(archive)) != facts.digest:  # it may have been on this disk for long
            mark_damaged(kept.folder)
            raise BadCache(f"{found[:12]} is on the disk for {facts.digest[:12]}")
        unpack(archive, made, facts.unpacked_bytes)
        if self._account is not None:
            give_to(made, self._account.uid, self._account.gid)

    # --- after a start ------------------------------------------------------------------------------------------------

    def _offer(self, start: _Start) -> None:
        """Packs the cache immediately, and uploads it unless the fleet has one. Raises BadCache or OSError if it cannot
        be packed."""
        archive = start.entry.cache / f"{start.entry.hex_digest}.offer"
        try:
            free = shutil.disk_usage(start.entry.cache).free - FREE_RESERVE_BYTES
            packed = pack(start.entry.folder, start.compiles.shared, archive, min(free, MOST_CACHE_BYTES))
            if packed is None:
                start.words = "empty: the engine compiled nothing"
                return
            start.digest, start.bytes, start.words = packed.digest, packed.packed_bytes, "to be uploaded"
            until_s = self._now_s() + OFFER_LIMIT_S
            while not self._upload(archive, packed, start):
                if self._now_s() > until_s or self._closed.wait(OFFER_EVERY_S):
                    return
        finally:
            archive.unlink(missing_ok=True)

    def _upload(self, archive: Path, packed: PackedCache, start: _Start) -> bool:
        """Sends all parts to one server. Returns whether that is settled, successfully or not."""
        for server in self._downloads.servers:
            try:
                at, part, is_stored = 0, b"", False  # it asks first
                while not is_stored:
                    status, answer = self._put(server, start.key, packed, at, part)
                    if status == HTTPStatus.TOO_EARLY:
                        start.words = f"to be uploaded: {str(answer.get('error', status))[:200]}"
                        return False
                    if status != HTTPStatus.OK:
                        start.words = f"not uploaded: {str(answer.get('error', status))[:200]}"
                        return True
                    following = answer.get("next")
                    if not isinstance(following, int) or not 0 <= following <= packed.packed_bytes:
                        raise ValueError(f"it asks for byte {following!r}")
                    if part and following == at:
                        raise ValueError(f"it asks for byte {at} again")
                    is_stored = at == following == packed.packed_bytes
                    with archive.open("rb") as file:
                        file.seek(following)
                        at, part = following, file.read(PART_BYTES)
                self._keep(archive, packed)
                start.words = "uploaded to the fleet"
                return True
            except (OSError, HTTPException, ValueError) as error:
                start.words = f"not uploaded yet: {server}: {error}"
        return False

    def _keep(self, archive: Path, packed: PackedCache) -> None:
        """Offers an archive to other nodes: the control plane has verified it and states its digest from now on."""
        kept = Entry(self._archives, packed.digest)

        def fill() -> None:
            archive.replace(_new_files(kept) / ARCHIVE_NAME)
            _make_room(kept, packed.packed_bytes, _limit() // ARCHIVES_SHARE)
            _put_in_place(kept)

        try:
            os.close(acquire(kept, fill, lambda: None))
        except (CannotFetch, OSError) as error:
            log.info("a compile cache is not kept for other nodes: %s", error)
            shutil.rmtree(kept.partial, ignore_errors=True)

    def _put(self, server: str, key: str, packed: PackedCache, at: int, part: bytes) -> tuple[int, dict[str, Any]]:
        headers = {}
        if part or at == packed.packed_bytes:
            headers = {
                "Content-Range": f"bytes {f'{at}-{at + len(part) - 1}' if part else '*'}/{packed.packed_bytes}",
                DIGEST_HEADER: packed.digest,
                UNPACKED_HEADER: str(packed.unpacked_bytes),
            }
        with self._downloads.request(server, "PUT", f"/agents/caches/{key}", headers, part) as answer:
            body = strict_loads(answer.read(BODY_BYTES_MAX) or b"{}")
            return answer.status, body if isinstance(body, dict) else {}


def _limit() -> int:
    return size_limit(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT_GIB) or 0


def _room() -> int:
    """Of the folders of engines, in bytes."""
    return _limit() - _limit() // ARCHIVES_SHARE


def _make_room(entry: Entry, total: int, limit: int) -> None:
    try:
        make_room(entry, total, limit)
    except CannotFetch as error:
        raise CannotFetch(str(error).replace(WEIGHTS_LIMIT, LIMIT_VARIABLE)) from None


def _new_files(kept: Entry) -> Path:
    """The folder for the file of an archive that is not complete. The caller holds its lock."""
    files = kept.partial / "files"
    files.mkdir(mode=0o700, parents=True, exist_ok=True)
    return files


def _put_in_place(kept: Entry) -> None:
    (kept.partial / "files").rename(kept.folder)
    shutil.rmtree(kept.partial, ignore_errors=True)


def _unproven(entry: Entry) -> Path:
    """Exists from the start of an engine with this cache until the engine is ready."""
    return entry.cache / f"{entry.hex_digest}.unproven"


def _lock_alone(entry: Entry) -> int | None:
    """Returns the descriptor of an exclusive lock; None if an engine uses the folder."""
    descriptor = os.open(entry.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
