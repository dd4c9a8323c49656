"""Compile caches of one node: fetches the cache of a start from the control plane before its engine starts, and offers
what the engine compiled once it is ready. A cache only saves time: every error here means a start without one, never a
failed start. The agent transfers caches itself, because engines must not have its credential."""

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
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import FREE_RESERVE_BYTES, CannotFetch, Entry, file_sha256, make_room, size_limit
from engine_agent.engines.base import CompileFolders
from engine_agent.engines.builds.store import hold
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
    DIGEST_HEADER,
    MOST_CACHE_BYTES,
    PART_BYTES,
    UNPACKED_HEADER,
    parse_unpacked,
)
from engine_agent.protocol.manifest import is_sha256
from engine_agent.protocol.messages import NodeCache
from engine_agent.protocol.strict_json import strict_loads

log = logging.getLogger(__name__)

FETCH_LIMIT_S = 120.0
"""Then an engine starts without the cache: compiling may be faster."""
OFFER_EVERY_S, OFFER_LIMIT_S = 5.0, 600.0
"""A cell serves some seconds after its last rank is ready; the control plane accepts a cache only then."""
BODY_BYTES_MAX = 4096


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
    is_prepared: bool = False
    is_used: bool = False
    was_empty: bool = False


class NodeCaches:
    """`account` is the engines' account, None if they run as the agent. `on_change` is called from another thread when
    a start may continue."""

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
        return (NodeCache(start.key, start.words, start.digest, start.bytes),) if start is not None else ()

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
        entry, archive, made = start.entry, start.entry.partial / "archive", start.entry.partial / "made"
        unpacked = 0

        def check_answer(answer: HTTPResponse) -> None:
            nonlocal unpacked
            digest, stated = answer.headers.get(DIGEST_HEADER, ""), parse_unpacked(answer.headers.get(UNPACKED_HEADER))
            if answer.length is None or not is_sha256(digest) or stated is None:
                raise ValueError("it sends a cache without length or digest")
            make_room(entry, answer.length + stated, _limit())
            start.digest, start.bytes, unpacked = digest, answer.length, stated

        start.words = "fetching the compile cache"
        entry.partial.mkdir(mode=0o700, exist_ok=True)
        fetch = Fetch(start.key, "the compile cache", 0, self._now_s, self._now_s() + FETCH_LIMIT_S)
        try:
            make_room(entry, 0, _limit())  # removes older ones, also if this engine will compile
            url = f"/agents/caches/{start.key}"
            self._downloads.file(fetch, url, archive, MOST_CACHE_BYTES, attempts=1, on_answer=check_answer)
            if (arrived := file_sha256(archive)) != start.digest:
                raise BadCache(f"{arrived[:12]} arrived for {start.digest[:12]}")
            unpack(archive, made, unpacked)
            if self._account is not None:
                give_to(made, self._account.uid, self._account.gid)
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
                start.words = "uploaded to the fleet"
                return True
            except (OSError, HTTPException, ValueError) as error:
                start.words = f"not uploaded yet: {server}: {error}"
        return False

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


def _limit() -> int | None:
    return size_limit(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT_GIB)


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
