"""Copies the access log from HAProxy into rotated files, and counts requests that failed without a cell. HAProxy writes
into a named pipe and never waits: lines that do not fit are lost, and it counts them. HAProxy keeps the pipe open, so a
new agent finds the lines that were written without one."""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine_agent.protocol.ingress_messages import STREAM_CUT, Refusals, RefusedAccount
from engine_agent.protocol.states import ServingClass

log = logging.getLogger(__name__)

PIPE_FILE = "access.pipe"
LOG_FILE = "access.log"
PIPE_BYTES = 1024 * 1024
"""Linux's default for `fs.pipe-max-size`: about 2,000 requests."""
MAX_FILE_BYTES = 64 * 1024 * 1024
FILES_KEPT = 4
"""Rotated files in addition to the current one: 320 MiB in all."""
RETRY_S = 1.0
BATCH_S = 0.05
"""After a first line: more lines follow, and are written together."""


def open_pipe(state_dir: Path) -> int:
    """The pipe of this state directory, created if necessary. Opened for reading and writing, so that it outlives other
    processes. Raises OSError if it cannot be made or opened."""
    path = state_dir / PIPE_FILE
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a smaller pipe works if the system allows no larger one
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


class LogPipe:
    """The pipe of one ingress and its files. `note` gets whole lines first, in a thread."""

    def __init__(
        self,
        state_dir: Path,
        max_file_bytes: int = MAX_FILE_BYTES,
        note: Callable[[bytes], None] = lambda lines: None,
    ) -> None:
        self._state_dir = state_dir
        self._path = state_dir / LOG_FILE
        self._max_file_bytes = max_file_bytes
        self._note = note
        self.problem = ""

    async def carry(self) -> None:
        """Copies until cancelled. A disk error is stored in `problem`, and the write retried."""
        pipe = await self._open()
        carried = None
        try:
            while True:
                await _readable(pipe)
                # In a thread: a slow disk must not delay reports.
                carried = asyncio.get_running_loop().run_in_executor(None, self._carry_batch, pipe)
                await asyncio.shield(carried)
                await asyncio.sleep(BATCH_S)
        finally:
            if carried is not None:
                await asyncio.wait([carried])  # once closed, the descriptor can be another file's
            os.close(pipe)

    async def _open(self) -> int:
        while True:
            try:
                self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
                return open_pipe(self._state_dir)
            except OSError as error:
                self._note_problem(f"access log: {error}")
                await asyncio.sleep(RETRY_S)

    def _carry_batch(self, pipe: int) -> None:
        try:
            written = os.read(pipe, PIPE_BYTES)
        except BlockingIOError:
            return
        lines = _request_lines(written)
        try:
            self._note(lines)
            with self._path.open("ab") as file:
                file.write(lines)
                size = file.tell()
            if size > self._max_file_bytes:
                self._rotate()
            self.problem = ""
        except OSError as error:
            self._note_problem(f"access log: {len(written)} bytes lost: {error}")

    def _rotate(self) -> None:
        for number in range(FILES_KEPT, 0, -1):
            newer = self._path.with_name(f"{LOG_FILE}.{number - 1}") if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(self._path.with_name(f"{LOG_FILE}.{number}"))

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.error("%s", problem)
        self.problem = problem


async def _readable(pipe: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe)


def _request_lines(written: bytes) -> bytes:
    """The lines about requests. HAProxy also logs exits of workers here; that is rare, so thousands of lines are first
    checked as one."""
    if not written.startswith(b"{") or written.count(b"\n{") != written.count(b"\n", 0, -1):
        lines = written.splitlines(keepends=True)
        for line in lines:
            if not line.startswith(b"{"):
                log.info("HAProxy: %s", line.decode(errors="replace").strip())
        written = b"".join(line for line in lines if line.startswith(b"{"))
    # HAProxy marks a redispatched request with a plus, and unknown values with a minus.
    return written.replace(b'"retries":+', b'"retries":').replace(b":-,", b":-1,")


FILE = "refusals.json"
MOST_DEPLOYMENTS = 500
"""Deployments with refused requests. Further ones count without a deployment."""
MOST_ACCOUNTS = 1024
"""Further ones count without a key."""
LIVES_KEPT = 256
"""Relay processes whose counts are known. More are not running."""
ACCOUNTS_PER_REPORT = 200
"""About 25 KB; a frame has at most 256."""
TURN_S = 15.0
UNKNOWN = "-"
POOL = "pool."
OF_DEADLINE = frozenset({"deadline_exceeded", "deadline_unreachable", "deadline_before_cell"})
UNKNOWN_METHOD = 501
"""The client's fault, in spite of its status."""
LEFT_BEFORE_ANSWER = frozenset({"CR", "CQ", "CC", "CH", "CT", "cR", "cQ", "cC", "cH", "cT"})
"""HAProxy's termination states: the client disconnected, or was silent, before the head of an answer."""
_CODE = re.compile(r"[a-z0-9_]{1,40}")

AccountName = tuple[str, str, str]


class LogLine(msgspec.Struct, frozen=True, rename={"serving_class": "class"}):
    """The fields of a line that decide whether it counts, and where."""

    status: int
    hop: str
    pool: str
    deployment: str
    key: str
    serving_class: str
    cell: str
    error: str
    handed_back: int
    is_sender: int
    ended: str


class _Stored(msgspec.Struct):
    since: str
    codes: dict[str, dict[str, int]]
    accounts: list[tuple[AccountName, int]]
    cut: list[tuple[AccountName, int]] = msgspec.field(default_factory=list)
    relays: dict[str, list[tuple[AccountName, int]]] = msgspec.field(default_factory=dict)
    """What relay processes had counted when that last changed, the oldest change first."""


_lines = msgspec.json.Decoder(LogLine)


def is_refused(line: LogLine) -> bool:
    if line.status < 500 or line.status == UNKNOWN_METHOD or line.hop != UNKNOWN or line.ended in LEFT_BEFORE_ANSWER:
        return False
    if line.is_sender == 1 or line.serving_class == ServingClass.BATCH or line.error in OF_DEADLINE:
        return False
    return line.cell == UNKNOWN or line.handed_back == 1


def deployment_of(line: LogLine) -> str:
    """Empty if the model was unknown."""
    if line.pool.startswith(POOL):
        return line.pool.removeprefix(POOL)
    return "" if line.deployment == UNKNOWN else line.deployment


class RefusalCounting:
    """Counts requests that ended with 5xx and that no cell counts, from the lines of the access log, and streams that
    ended early, as relays count them. The counts are in a file next to the log. One thread notes, another reports.

    A request counts once, at the ingress that its client connected to: a line with a hop mark is another region's.
    Cells count their own final failures. A request that a cell handed back counts here if the client got no better
    answer. Failures that no user saw do not count: of clients that disconnected, of requests whose deadline passed, and
    of requests that are sent again until their time is over (class `batch`, and those that the control plane sends
    later)."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._lock = threading.Lock()
        self._since = str(uuid.uuid4())
        self._codes: dict[str, dict[str, int]] = {}
        self._accounts: dict[AccountName, int] = {}
        self._cut: dict[AccountName, int] = {}
        self._relays: dict[str, dict[AccountName, int]] = {}
        self._turn_began_s = 0.0
        self._first = 0
        self._load()

    def note(self, lines: bytes) -> None:
        """Count whole lines of the access log. Raises OSError if the counts could not be written; they are counted."""
        refused = [line for line in _failed(lines) if is_refused(line)]
        if not refused:
            return
        with self._lock:
            for line in refused:
                self._count(line)
            self._store()

    def note_cut(self, relay: str, cut: Iterable[RefusedAccount]) -> None:
        """Adds what this relay process has counted since it was read last."""
        totals = {(each.deployment, each.key, each.serving_class): each.cut for each in cut}
        with self._lock:
            before = self._relays.get(relay, {})
            if totals == before:
                return
            self._relays.pop(relay, None)
            self._relays[relay] = totals
            for life in list(self._relays)[:-LIVES_KEPT]:
                del self._relays[life]
            for name, total in totals.items():
                self._add(name, STREAM_CUT, self._cut, max(0, total - before.get(name, 0)))
            with contextlib.suppress(OSError):  # the totals in memory are reported, and written with the next change
                self._store()

    def _store(self) -> None:
        relays = {life: list(totals.items()) for life, totals in self._relays.items()}
        stored = _Stored(self._since, self._codes, list(self._accounts.items()), list(self._cut.items()), relays)
        beside = self._path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(stored))
        os.replace(beside, self._path)

    def report(self, now_s: float) -> Refusals | None:
        """The refused requests for a report; None if there were none."""
        with self._lock:
            if not self._codes:
                return None
            if now_s >= self._turn_began_s + TURN_S:
                self._turn_began_s = now_s
                is_last = self._first + ACCOUNTS_PER_REPORT >= len(self._accounts.keys() | self._cut)
                self._first = 0 if is_last else self._first + ACCOUNTS_PER_REPORT
            shown = sorted(self._accounts.keys() | self._cut)[self._first : self._first + ACCOUNTS_PER_REPORT]
            accounts = tuple(
                RefusedAccount(name[0], self._accounts.get(name, 0), name[1], name[2], self._cut.get(name, 0))
                for name in shown
            )
            codes = {deployment: dict(counts) for deployment, counts in self._codes.items()}
        return Refusals(self._since, codes, accounts)

    def _count(self, line: LogLine) -> None:
        code = line.error if _CODE.fullmatch(line.error) else f"status_{line.status}"
        key = "" if line.key == UNKNOWN else line.key
        serving_class = "" if line.serving_class == UNKNOWN else line.serving_class
        self._add((deployment_of(line), key, serving_class), code, self._accounts, 1)

    def _add(self, name: AccountName, code: str, accounts: dict[AccountName, int], count: int) -> None:
        deployment, key, serving_class = name
        if deployment not in self._codes and len(self._codes) >= MOST_DEPLOYMENTS:
            deployment = ""
        counts = self._codes.setdefault(deployment, {})
        counts[code] = counts.get(code, 0) + count
        name = (deployment, key, serving_class)
        if name not in accounts and len(accounts) >= MOST_ACCOUNTS:
            name = (deployment, "", serving_class)
        accounts[name] = accounts.get(name, 0) + count

    def _load(self) -> None:
        """An unreadable count starts again, under a new name, so nothing counts twice."""
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, counting begins anew: %s", self._path, error)
            return
        self._since, self._codes, self._accounts = stored.since, stored.codes, dict(stored.accounts)
        self._cut = dict(stored.cut)
        self._relays = {life: dict(totals) for life, totals in stored.relays.items()}


def _failed(lines: bytes) -> list[LogLine]:
    if b'"status":5' not in lines:
        return []
    found = []
    for line in lines.splitlines():
        if b'"status":5' in line:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(_lines.decode(line))
    return found
