"""Downloads of a node: artifacts by digest, in threads. Their files come from other nodes that hold them, else from any
server of the control plane, where they continue where an earlier attempt stopped. The agent downloads them
itself, because its engines must neither have its credential nor be able to change what other engines run."""

import contextlib
import errno
import logging
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

import msgspec

from engine_agent.engines.artifacts import CannotFetch, file_sha256
from engine_agent.engines.s3_artifact import Arrived
from engine_agent.node.enrolment import Enrolment, control_connection, node_connection
from engine_agent.node.identity import Identity
from engine_agent.protocol.manifest import DIGEST_PREFIX
from engine_agent.protocol.messages import HOLDERS_MAX, Holder
from engine_agent.protocol.ports import ARTIFACTS

ANSWER_LIMIT_S = 30.0
ATTEMPTS = 5
"""Of one file without a further byte, over all servers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER = 0.5, 30.0, 0.5
BUSY_LIMIT_S = 3600.0
"""How long a control plane may be too busy for one file: all hosts of a fleet may fetch at the same time."""
CHUNK_BYTES = 256 * 1024
MOST_DIGITS = 5
WORDS_EVERY_S = 5.0
"""Interval of changes in the progress; each one causes a report to the control plane."""
HOLDERS_EVERY_S, HOLDERS_AFTER_ERROR_S = 10.0, 60.0
"""Interval of requests for the nodes that hold an artifact."""
MOST_HOLDERS_BYTES = 4096
PEER_LIMIT_S = 5.0
"""For a connection to another node, and for each answer and chunk of it."""
PEER_LEAST_BYTES_PER_S = 25_000_000.0
"""Over `PEER_LIMIT_S`: each of four uploads has more on 1 Gbit/s. Files of slower nodes come from elsewhere."""
MOST_BAD_PEERS = 3
"""Of one artifact; then all the rest comes from the control plane or the bucket."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})

log = logging.getLogger(__name__)


class NotThere(CannotFetch):
    """Every server answered that it has no such file."""


class Fetch:
    """One artifact on its way. `name`: as errors and the progress name it; `whole`: its bytes once they are unpacked,
    0 for one that is not packed; `until_s`: when it is given up; `peers_until_s`: until when other nodes may send it.
    `peer_bytes`: what came from other nodes."""

    def __init__(
        self,
        digest: str,
        name: str,
        whole: int,
        now_s: Callable[[], float],
        until_s: float = math.inf,
        peers_until_s: float = math.inf,
    ) -> None:
        self.digest = digest
        self.name = name
        self.until_s = until_s
        self.peers_until_s = peers_until_s
        self.trouble = ""
        self.is_over = False
        self.arrived = Arrived()
        self.unpacked = 0
        self.peer_bytes = 0
        self.holders: tuple[Holder, ...] = ()
        self.ask_at_s = -math.inf
        self.bad_peers: set[str] = set()
        self._whole = whole
        self._now_s = now_s
        self._words, self._words_at_s = "", 0.0

    def words(self) -> str:
        now_s = self._now_s()
        if not self._words or now_s - self._words_at_s >= WORDS_EVERY_S:
            is_unpacking = self.unpacked and self._whole
            doing = f"unpacked {self.unpacked * 100 // self._whole} %" if is_unpacking else self.arrived.words()
            self._words, self._words_at_s = f"{self.name}: {doing}", now_s
        return self._words


class Downloads:
    """`on_change` is called from another thread when a fetch has ended."""

    def __init__(
        self, enrolment: Enrolment, on_change: Callable[[], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._enrolment = enrolment
        self._identity = Identity(enrolment.home)
        self._on_change = on_change
        self._now_s = now_s
        self._fetches: dict[str, Fetch] = {}
        self._closed = threading.Event()

    @property
    def servers(self) -> tuple[str, ...]:
        return self._enrolment.servers.all

    @property
    def running(self) -> tuple[Fetch, ...]:
        return tuple(fetch for fetch in [*self._fetches.values()] if not fetch.is_over)

    def words(self, digest: str) -> str:
        """The progress of an artifact that is on its way; an empty text for others."""
        fetch = self._fetches.get(digest)
        return fetch.words() if fetch is not None and not fetch.is_over else ""

    def peer_bytes(self, digest: str) -> int:
        """How much of an artifact this agent fetched from other nodes."""
        return fetch.peer_bytes if (fetch := self._fetches.get(digest)) is not None else 0

    def begin(self, digest: str, name: str, fill: Callable[[Fetch], None], whole: int = 0) -> None:
        """Starts to fetch an artifact unless it is on its way. Raises CannotFetch if the last fetch of it failed; the
        next call tries again."""
        fetch = self._fetches.get(digest)
        if fetch is not None and not fetch.is_over:
            return
        if self._fetches.pop(digest, None) is not None and fetch is not None and fetch.trouble:
            raise CannotFetch(fetch.trouble)
        fetch = self._fetches[digest] = Fetch(digest, name, whole, self._now_s)
        threading.Thread(target=self._run, args=(fetch, fill), name=name, daemon=True).start()

    def close(self) -> None:
        """Ends fetches; what arrived is kept for the next one."""
        self._closed.set()

    def check_open(self, fetch: Fetch) -> None:
        """Raises CannotFetch if the agent stops, or it is too late."""
        if self._closed.is_set():
            raise CannotFetch("the agent stops")
        if self._now_s() > fetch.until_s:
            raise CannotFetch(f"{fetch.name} did not arrive in time")

    def _run(self, fetch: Fetch, fill: Callable[[Fetch], None]) -> None:
        try:
            fill(fetch)
        except CannotFetch as error:
            fetch.trouble = str(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fetch.trouble = f"{fetch.name} cannot be stored: {'the disk is full' if full else error}"
        except Exception as error:  # a thread's exception would be lost
            fetch.trouble = f"{fetch.name} cannot be fetched: {type(error).__name__}: {error}"
        finally:
            fetch.is_over = True
            if not self._closed.is_set():
                self._on_change()

    # --- from the control plane ---------------------------------------------------------------------------------------

    def files(
        self,
        fetch: Fetch,
        url: str,
        folder: Path,
        wanted: Mapping[str, str],
        sizes: Mapping[str, int],
        *,
        attempts: int = ATTEMPTS,
    ) -> None:
        """Completes a folder with the files of an artifact, from nodes that hold it or from below `url` on the control
        plane's servers. `wanted`: SHA-256 by name; `sizes`: the most bytes by name. Raises CannotFetch if one does not
        arrive undamaged."""
        for name in self._in_own_order(wanted):
            path, digest = folder / name, wanted[name]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(2):  # a wrong beginning of an earlier attempt costs one more
                if _is_whole(path, digest) or self._from_peers(fetch, folder, name, digest, sizes[name]):
                    break
                path.unlink(missing_ok=True)
                self.file(fetch, f"{url}/{quote(name)}", path, sizes[name], attempts=attempts)
            else:
                if not _is_whole(path, digest):
                    path.unlink(missing_ok=True)
                    raise CannotFetch(f"{fetch.name} arrives damaged: {name} differs from its manifest")

    def file(self, fetch: Fetch, url: str, path: Path, most_bytes: int, *, attempts: int = ATTEMPTS) -> None:
        """Downloads `url`, a path on the control plane's servers, to a file, from where an earlier attempt stopped.
        Raises CannotFetch if no server has it, or it does not arrive."""
        failures = 0
        coming = path.with_name(f"{path.name}.coming")
        pause_s, busy_until_s = FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
        while True:
            before = coming.stat().st_size if coming.exists() else 0
            troubles, wait_s, missing = list[str](), 0.0, 0
            for server in self.servers:
                try:
                    self._append(server, fetch, url, coming, most_bytes)
                    coming.replace(path)
                    return
                except (OSError, HTTPException, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    wait_s = max(wait_s, error.after_s) if isinstance(error, _RetryLater) else wait_s
                    missing += isinstance(error, _Missing)
                    troubles.append(f"{server}: {error}")
            has_grown = coming.exists() and coming.stat().st_size > before
            if has_grown:
                failures, pause_s, busy_until_s = 0, FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
            is_busy = attempts > 1 and wait_s > 0 and self._now_s() < busy_until_s
            failures += not is_busy
            if failures >= attempts:
                kind = NotThere if missing == len(troubles) else CannotFetch
                raise kind(f"{fetch.name} does not arrive: {'; '.join(troubles)}")
            self._closed.wait(min(LONGEST_PAUSE_S, max(wait_s, pause_s)) * random.uniform(1, 1 + JITTER))
            self.check_open(fetch)
            pause_s *= 1 if is_busy else 2

    @contextlib.contextmanager
    def request(
        self,
        server: str,
        method: str,
        url: str,
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes | None = None,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> Iterator[HTTPResponse]:
        """The answer of one server to this node. Raises OSError, HTTPException or ValueError if there is none."""
        connection = control_connection(server, self._identity, limit_s)
        sent = {"Authorization": f"Bearer {self._enrolment.stored_credential()}", **headers}
        try:
            connection.request(method, url, body, sent)
            yield connection.getresponse()
        finally:
            connection.close()

    def _append(self, server: str, fetch: Fetch, url: str, coming: Path, most_bytes: int) -> None:
        at = coming.stat().st_size if coming.exists() else 0
        with self.request(server, "GET", url, {"Range": f"bytes={at}-"} if at else {}) as answer:
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                coming.unlink(missing_ok=True)
                raise _RetryLater("it has another file")
            _check_answer(answer)
            if answer.status == HTTPStatus.OK and at:
                coming.unlink()
                at = 0
            self._receive(answer, fetch, coming, most_bytes - at)

    def _receive(
        self,
        answer: HTTPResponse,
        fetch: Fetch,
        to: Path,
        most_bytes: int,
        *,
        least_bytes_per_s: float = 0.0,
        until_s: float = math.inf,
    ) -> None:
        left = answer.length
        if left is None or left > most_bytes:
            raise ValueError(f"it sends {left} bytes; at most {most_bytes} may be")
        since_s, count = self._now_s(), 0
        with to.open("ab") as file:
            while left and (chunk := answer.read1(CHUNK_BYTES)):
                file.write(chunk)
                left, count = left - len(chunk), count + len(chunk)
                fetch.arrived.add(len(chunk))
                self.check_open(fetch)
                if self._now_s() > until_s:
                    raise ValueError("it does not send all of it in time")
                if self._now_s() - since_s >= PEER_LIMIT_S:
                    if count < least_bytes_per_s * PEER_LIMIT_S:
                        raise ValueError(f"it sends {count / PEER_LIMIT_S:.0f} bytes per second")
                    since_s, count = self._now_s(), 0
            file.flush()
            os.fsync(file.fileno())
        if left:
            raise _RetryLater(f"{left} bytes are missing")

    # --- from other nodes ---------------------------------------------------------------------------------------------

    def is_held(self, fetch: Fetch) -> bool:
        """Whether there are other nodes to get it from."""
        return bool(self._holders(fetch))

    def files_of_peers(self, fetch: Fetch, folder: Path, wanted: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        """Adds those files of an artifact that other nodes hold; the caller fetches all others."""
        for name in self._in_own_order(wanted):
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists() and self._from_peers(fetch, folder, name, wanted[name], sizes[name]):
                fetch.arrived.add(-path.stat().st_size)  # the caller counts what it finds

    def _in_own_order(self, names: Mapping[str, str]) -> list[str]:
        """Nodes that fetch the same artifact start with different files, and get the others from each other."""
        ordered = sorted(names)
        first = zlib.crc32(self._enrolment.agent_id.encode()) % max(1, len(ordered))
        return [*ordered[first:], *ordered[:first]]

    def _from_peers(self, fetch: Fetch, folder: Path, name: str, digest: str, size: int) -> bool:
        """Whether another node sent this file. A node that sends anything else is not asked again for this artifact. A
        file that began to arrive from the control plane continues there."""
        path, url = folder / name, f"/{fetch.digest.removeprefix(DIGEST_PREFIX)}/{quote(name)}"
        coming = folder.with_name(f"{folder.name}.peer")  # no name of a manifest
        if path.with_name(f"{path.name}.coming").exists():
            return False
        for holder in self._holders(fetch):
            try:
                if not self._ask_peer(holder, fetch, url, coming, size):
                    continue
                if file_sha256(coming) != digest:
                    raise ValueError("it sends another file")
            except (OSError, HTTPException, ValueError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.info("%s: not from node %s: %s", fetch.name, holder.node, error)
                fetch.bad_peers.add(holder.node)
            else:
                fetch.peer_bytes += coming.stat().st_size
                coming.replace(path)
                return True
            finally:
                if coming.exists():
                    fetch.arrived.add(-coming.stat().st_size)
                    coming.unlink()
        return False

    def _ask_peer(self, holder: Holder, fetch: Fetch, url: str, to: Path, most_bytes: int) -> bool:
        """Whether this node sent the file; one that is busy or lacks it does not."""
        to.unlink(missing_ok=True)
        port = holder.port_base + ARTIFACTS
        connection = node_connection(holder.node, holder.address, port, self._identity, PEER_LIMIT_S)
        try:
            connection.request("GET", url)
            answer = connection.getresponse()
            if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE):
                return False
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"it answered {answer.status}")
            limits = {"least_bytes_per_s": PEER_LEAST_BYTES_PER_S, "until_s": fetch.peers_until_s}
            self._receive(answer, fetch, to, most_bytes, **limits)
        finally:
            connection.close()
        return True

    def _holders(self, fetch: Fetch) -> tuple[Holder, ...]:
        """The nodes that may be asked, as the control plane last named them."""
        is_late = self._now_s() > fetch.peers_until_s
        if is_late or not self._identity.has_certificate or len(fetch.bad_peers) >= MOST_BAD_PEERS:
            return ()
        if self._now_s() >= fetch.ask_at_s:
            fetch.ask_at_s = self._now_s() + HOLDERS_AFTER_ERROR_S
            url = f"/agents/holders/{fetch.digest.removeprefix(DIGEST_PREFIX)}"
            with (
                contextlib.suppress(OSError, HTTPException, ValueError),
                self.request(self._enrolment.servers.current, "GET", url, limit_s=PEER_LIMIT_S) as answer,
            ):
                if answer.status == HTTPStatus.OK:
                    named = msgspec.json.decode(answer.read(MOST_HOLDERS_BYTES), type=list[Holder])
                    fetch.holders = tuple(named[:HOLDERS_MAX])
                    fetch.ask_at_s = self._now_s() + HOLDERS_EVERY_S
        return tuple(holder for holder in fetch.holders if holder.node not in fetch.bad_peers)


def _is_whole(path: Path, wanted: str) -> bool:
    return path.exists() and file_sha256(path) == wanted


def _check_answer(answer: HTTPResponse) -> None:
    if answer.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        return
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        stated = answer.headers.get("Retry-After", "")
        after_s = float(stated) if stated.isdecimal() and len(stated) <= MOST_DIGITS else FIRST_PAUSE_S
        raise _RetryLater(f"it answered {answer.status}", after_s)
    kind = _Missing if answer.status == HTTPStatus.NOT_FOUND else ValueError
    raise kind(f"it answered {answer.status}: {answer.read(300).decode(errors='replace')}")


class _RetryLater(ValueError):
    """A server cannot answer now. `after_s`: the pause of a busy one; 0: the answer broke off."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _Missing(ValueError):
    """A server has no such file."""
