"""Runs one command to its end, showing and logging what it says: initdb, migrations, seeding, installing."""

import asyncio
import signal
from dataclasses import dataclass

from controlplane.embedded.console import Console
from controlplane.embedded.errors import CannotStart
from controlplane.embedded.home import Home
from controlplane.embedded.lines import LineSplitter
from controlplane.embedded.rotating_log import RotatingLog
from controlplane.embedded.spawning import Program, Spawned, end_session, spawn

_GRACE_S = 5.0
_LAST_WORDS_S = 1.0


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
    listening = _Listening(process, name, log, None if quiet else console)
    try:
        async with asyncio.timeout(deadline_s):
            status = await process.wait()
        return Outcome(status, await listening.last_line())
    except TimeoutError:
        raise CannotStart(
            f"{name} was not done after {deadline_s:.0f} s; what it said is in {home.logs / name}.log."
        ) from None
    finally:
        await _end(process)
        await listening.last_line()
        process.close()
        log.close()


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


class _Listening:
    """Shows and logs what a command says, and remembers the last of it."""

    def __init__(self, process: Spawned, name: str, log: RotatingLog, console: Console | None) -> None:
        self._process = process
        self._name = name
        self._log = log
        self._console = console
        self._last_line = ""
        self._task = asyncio.create_task(self._listen())

    async def last_line(self) -> str:
        """The last line that says something, once the command is over.

        What it started may hold the pipe for ever, so the wait for the pipe's end is short.
        """
        await asyncio.wait([self._task], timeout=_LAST_WORDS_S)
        self._task.cancel()
        return self._last_line

    async def _listen(self) -> None:
        splitter = LineSplitter()
        while chunk := await self._process.read():
            self._show(splitter.feed(chunk))
        self._show(splitter.finish())

    def _show(self, lines: list[str]) -> None:
        self._log.write(lines)
        if self._console:
            self._console.progress_lines(self._name, lines)
        self._last_line = next((line for line in reversed(lines) if line.strip()), self._last_line)


async def _end(process: Spawned) -> None:
    """End a command that was cut short, and whatever it left in its session."""
    if process.is_running:
        end_session(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            end_session(process.pid, signal.SIGKILL)
            await process.wait()
    end_session(process.pid, signal.SIGKILL)
