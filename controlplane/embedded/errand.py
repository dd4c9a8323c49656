"""Runs one command to its end, showing and logging what it says: initdb, migrations, seeding, installing."""

import asyncio
import signal
from asyncio.subprocess import Process
from dataclasses import dataclass

from controlplane.embedded.console import Console
from controlplane.embedded.errors import CannotStart
from controlplane.embedded.home import Home
from controlplane.embedded.lines import LineSplitter
from controlplane.embedded.rotating_log import RotatingLog
from controlplane.embedded.spawning import Program, end_session, read_chunk, spawn

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: its exit status and the last line that it wrote."""

    status: int
    last_line: str


async def run_errand(
    name: str, program: Program, home: Home, console: Console, *, deadline_s: float, quiet: bool = False
) -> Outcome:
    """Run `program`, logging to `<name>.log`; with `quiet` nothing is shown.

    Raises:
        CannotStart: it did not end within `deadline_s`.
    """
    log = RotatingLog(home.logs / f"{name}.log")
    process = await spawn(program)
    try:
        async with asyncio.timeout(deadline_s):
            last_line = await _follow(process, name, log, None if quiet else console)
            return Outcome(await process.wait(), last_line)
    except TimeoutError:
        raise CannotStart(
            f"{name} was not done after {deadline_s:.0f} s; what it said is in {home.logs / name}.log."
        ) from None
    finally:
        log.close()
        await _end(process)


async def require_errand(
    name: str, program: Program, home: Home, console: Console, *, deadline_s: float, quiet: bool = False
) -> str:
    """Run `program` as `run_errand` does and return its last line.

    Raises:
        CannotStart: it failed or did not end within `deadline_s`.
    """
    outcome = await run_errand(name, program, home, console, deadline_s=deadline_s, quiet=quiet)
    if outcome.status != 0:
        raise CannotStart(
            f"{name} failed ({outcome.last_line or f'exit status {outcome.status}'}); "
            f"the whole story is in {home.logs / name}.log."
        )
    return outcome.last_line


async def _follow(process: Process, name: str, log: RotatingLog, console: Console | None) -> str:
    splitter, last_line = LineSplitter(), ""
    while chunk := await read_chunk(process):
        lines = splitter.feed(chunk)
        last_line = _show(lines, name, log, console) or last_line
    return _show(splitter.finish(), name, log, console) or last_line


def _show(lines: list[str], name: str, log: RotatingLog, console: Console | None) -> str:
    log.write(lines)
    if console:
        console.process_lines(name, lines)
    return next((line for line in reversed(lines) if line.strip()), "")


async def _end(process: Process) -> None:
    """End a command that was cut short, and whatever it started in its session."""
    if process.returncode is None:
        end_session(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            end_session(process.pid, signal.SIGKILL)
            await process.wait()
    end_session(process.pid, signal.SIGKILL)
