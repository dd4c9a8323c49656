"""Starts a process of the launcher: own session, guarded against outliving the launcher, output through a pipe.

Must be called on the main thread's event loop: the kernel's death signal follows the thread that forked.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")

_CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `account` drops root for that account; `traverse` keeps its right to pass closed folders."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    death_signal: signal.Signals = signal.SIGTERM
    account: str | None = None
    traverse: bool = False


def guarded(program: Program) -> list[str]:
    """The command line that runs `program` behind the guard."""
    options = ["--parent", str(os.getpid()), "--death-signal", str(int(program.death_signal))]
    if program.account:
        options += ["--account", program.account]
    if program.traverse:
        options += ["--traverse"]
    return [sys.executable, "-I", "-S", str(GUARD), *options, "--", *program.arguments]


class Spawned:
    """A started process. Its output has a pipe of ours: asyncio's own would make `wait` last until every descendant
    that inherited it is gone."""

    def __init__(self, process: Process, output: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe

    @property
    def pid(self) -> int:
        """Its pid, which is also the id of its session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; minus the signal's number when a signal ended it."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that is gone does not hear it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def read(self) -> bytes:
        """The next piece of standard output and error; empty at its end."""
        return await self._output.read(_CHUNK_BYTES)

    def close(self) -> None:
        """Read no more."""
        self._pipe.close()


async def spawn(program: Program) -> Spawned:
    """Start `program` behind the guard, in a session of its own. A cancelled start leaves no process."""
    starting = asyncio.create_task(_start(program))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            started = await starting
            end_session(started.pid, signal.SIGKILL)
            await started.wait()
            started.close()
        raise


async def _start(program: Program) -> Spawned:
    reading, writing = os.pipe()
    output = asyncio.StreamReader()
    try:
        process = await asyncio.create_subprocess_exec(
            *guarded(program),
            env=dict(program.environment),
            cwd=program.folder,
            stdin=DEVNULL,
            stdout=writing,
            stderr=STDOUT,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", buffering=0)
    )
    return Spawned(process, output, pipe)


def end_session(session: int, number: signal.Signals) -> None:
    """Send a signal to the process group that `session` leads; nobody left is fine."""
    try:
        os.killpg(session, number)
    except (ProcessLookupError, PermissionError):
        return
