"""Starts a process of the launcher: own session, guarded against outliving the launcher, output through a pipe.

Must be called on the main thread's event loop: the kernel's death signal follows the thread that forked.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
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


async def spawn(program: Program) -> Process:
    """Start `program`; its standard output and error come through `process.stdout`."""
    return await asyncio.create_subprocess_exec(
        *guarded(program),
        env=dict(program.environment),
        cwd=program.folder,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )


async def read_chunk(process: Process) -> bytes:
    """The next piece of output; empty at its end."""
    assert process.stdout is not None  # noqa: S101 - spawn always gives a pipe
    return await process.stdout.read(_CHUNK_BYTES)


def end_session(session: int, number: signal.Signals) -> None:
    """Send a signal to the process group that `session` leads; nobody left is fine."""
    try:
        os.killpg(session, number)
    except (ProcessLookupError, PermissionError):
        return
