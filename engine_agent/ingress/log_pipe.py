"""Carries the access log from HAProxy into files that are kept short.

HAProxy writes into a named pipe and never waits: what does not fit is lost and counted by itself. The pipe is held open
by HAProxy, too, so that a new agent finds in it what was written while there was none. It never judges what it carries.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

PIPE_FILE = "access.pipe"
LOG_FILE = "access.log"
PIPE_BYTES = 1024 * 1024
"""Linux's default for `fs.pipe-max-size`: about 2,000 requests."""
MAX_FILE_BYTES = 64 * 1024 * 1024
FILES_KEPT = 4
"""Older files beside the one that is written: 320 MiB in all."""
RETRY_S = 1.0
BATCH_S = 0.05
"""After something came: a little more comes with it, and is written at once."""


def open_pipe(state_dir: Path) -> int:
    """The pipe of this state directory, made if it is not there; both ends, so that it outlives the other processes
    that have it open.

    Raises:
        OSError: it cannot be made or opened.
    """
    path = state_dir / PIPE_FILE
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a smaller pipe serves, too, if the system allows no larger one
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


class LogPipe:
    """The pipe of one ingress and the files behind it. `note` gets whole lines first, in a thread of its own."""

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
        """Carry until cancelled. A disk error is kept in `problem`, and the write tried again."""
        pipe = await self._open()
        carried = None
        try:
            while True:
                await _readable(pipe)
                # In a thread: a disk may take its time, and reports must not wait for it.
                carried = asyncio.get_running_loop().run_in_executor(None, self._carry_batch, pipe)
                await asyncio.shield(carried)
                await asyncio.sleep(BATCH_S)
        finally:
            if carried is not None:
                await asyncio.wait([carried])  # once closed, the number of the pipe may be another file's
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
    """Return once there is something in it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe)


def _request_lines(written: bytes) -> bytes:
    """The lines about requests. HAProxy says here, too, when a worker of it ends; that is rare, so thousands of lines
    are first looked at as one."""
    if not written.startswith(b"{") or written.count(b"\n{") != written.count(b"\n", 0, -1):
        lines = written.splitlines(keepends=True)
        for line in lines:
            if not line.startswith(b"{"):
                log.info("HAProxy: %s", line.decode(errors="replace").strip())
        written = b"".join(line for line in lines if line.startswith(b"{"))
    # HAProxy marks a request that went on to another cell with a plus, and what it does not know with a minus.
    return written.replace(b'"retries":+', b'"retries":').replace(b":-,", b":-1,")
