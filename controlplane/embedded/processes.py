"""Starts the launcher's processes: own session, guarded against outliving the launcher, output through a pipe. Runs
one-shot commands (initdb, migrations, seeding, installing) to their end, showing and logging their output.

Must be called on the main thread's event loop: the kernel's death signal follows the thread that forked."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console, LineSplitter, RotatingLog
from controlplane.embedded.state_directory import Secrets, StateDirectory

HOME_MARK = "SWITCHYARD_LAUNCHED_FROM"
"""Carried by everything that a launcher starts, directly or not: by it a process is known to belong to a home."""

_NOT_PASSED_ON = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "DETACH", "WAIT_S")


def control_plane_environment(
    inherited: Mapping[str, str],
    configuration: Configuration,
    secrets: Secrets,
    *,
    database_url: str,
    redis_url: str,
) -> dict[str, str]:
    """Variables of the control plane's processes and management commands; agents inherit them."""
    return {
        **{name: text for name, text in inherited.items() if name not in _NOT_PASSED_ON},
        HOME_MARK: str(configuration.home),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "SWITCHYARD_HOME": str(configuration.home),
        "SWITCHYARD_CACHE": str(configuration.cache),
        "SWITCHYARD_PORT": str(configuration.port),
        "SWITCHYARD_AGENT_PORT": str(configuration.agent_port),
        "SWITCHYARD_INGRESS_PORT": str(configuration.ingress_port),
        "SWITCHYARD_INGRESSES": str(configuration.ingresses),
        "SWITCHYARD_SECRET_KEY": secrets.secret_key,
        "PYTHONUNBUFFERED": "1",
        # setproctitle would otherwise overwrite the environment in which we look for the home's mark.
        "SPT_NOENV": "1",
    }


def server_environment(inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables of the embedded servers: no secrets, and no PG* variables, which would change their behaviour."""
    passed_on = {name: text for name, text in inherited.items() if name in {"PATH", "TZ", "LD_LIBRARY_PATH"}}
    return {**passed_on, HOME_MARK: str(home), "LC_ALL": "C"}


GUARD = Path(__file__).with_name("exec_guard.py")

_CHUNK_BYTES = 65536


CONTROL_NICE = -5
"""Of what notices faults and heals them, and of what that waits for: before engines and housekeeping of this host, in
about three shares to one."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `account` drops root for that account; `traverse` keeps its right to pass closed folders. `nice`:
    below 0 goes before others, where we may. `umask`: what it writes is its own, unless that says else."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    death_signal: signal.Signals = signal.SIGTERM
    account: str | None = None
    traverse: bool = False
    nice: int = 0
    umask: int = 0o077


def guarded(program: Program) -> list[str]:
    """The command line that runs `program` behind the guard."""
    options = ["--parent", str(os.getpid()), "--death-signal", str(int(program.death_signal))]
    if program.nice:
        options += ["--nice", str(program.nice)]
    if program.account:
        options += ["--account", program.account]
    if program.traverse:
        options += ["--traverse"]
    return [sys.executable, "-I", "-S", str(GUARD), *options, "--", *program.arguments]


class Spawned:
    """A started process. Its output has a separate pipe: with asyncio's, `wait` would last until every descendant that
    inherited the pipe has exited."""

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
        self._pipe.close()


async def spawn(program: Program) -> Spawned:
    """Start `program` behind the guard, in a new session. A cancelled start leaves no process."""
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
            umask=program.umask,
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
    """Send a signal to the process group that `session` leads, if it still exists."""
    try:
        os.killpg(session, number)
    except (ProcessLookupError, PermissionError):
        return


_GRACE_S = 5.0
_OUTPUT_DRAIN_S = 1.0
_LINES_KEPT = 10


@dataclass(frozen=True, slots=True)
class OneshotResult:
    """How a command ended: its exit status and the last lines that it wrote."""

    status: int
    last_lines: tuple[str, ...]

    @property
    def last_line(self) -> str:
        return self.last_lines[-1] if self.last_lines else ""


async def run_oneshot(
    name: str, program: Program, home: StateDirectory, console: Console, *, deadline_s: float, quiet: bool = False
) -> OneshotResult:
    """Run `program`, logging to `<name>.log`; with `quiet` nothing is shown. Raises CannotStart if it did not end
    within `deadline_s`."""
    log = RotatingLog(home.logs / f"{name}.log")
    process = await spawn(program)
    output = _OutputReader(process, name, log, None if quiet else console)
    try:
        async with asyncio.timeout(deadline_s):
            status = await process.wait()
        return OneshotResult(status, await output.last_lines())
    except TimeoutError:
        raise CannotStart(
            f"{name} was not done after {deadline_s:.0f} s; what it said is in {home.logs / name}.log."
        ) from None
    finally:
        await _kill_session(process)
        await output.last_lines()
        process.close()
        log.close()


async def require_oneshot(
    name: str, program: Program, home: StateDirectory, console: Console, *, deadline_s: float, quiet: bool = False
) -> str:
    """Run `program` as `run_oneshot` does and return its last line. Raises CannotStart if it failed or did not end
    within `deadline_s`."""
    outcome = await run_oneshot(name, program, home, console, deadline_s=deadline_s, quiet=quiet)
    if outcome.status != 0:
        if quiet:  # the reason often stands some lines before the last
            console.progress_lines(name, list(outcome.last_lines))
        raise CannotStart(
            f"{name} failed ({outcome.last_line or f'exit status {outcome.status}'}); "
            f"the whole story is in {home.logs / name}.log."
        )
    return outcome.last_line


class _OutputReader:
    """Shows and logs what a command writes, and keeps the end of it."""

    def __init__(self, process: Spawned, name: str, log: RotatingLog, console: Console | None) -> None:
        self._process = process
        self._name = name
        self._log = log
        self._console = console
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._task = asyncio.create_task(self._listen())

    async def last_lines(self) -> tuple[str, ...]:
        """The last lines that are not blank, once the command is over.

        Its children may keep the pipe open, so the wait for the pipe's end is short."""
        await asyncio.wait([self._task], timeout=_OUTPUT_DRAIN_S)
        self._task.cancel()
        return tuple(self._last_lines)

    async def _listen(self) -> None:
        splitter = LineSplitter()
        while chunk := await self._process.read():
            self._show(splitter.feed(chunk))
        self._show(splitter.finish())

    def _show(self, lines: list[str]) -> None:
        self._log.write(lines)
        if self._console:
            self._console.progress_lines(self._name, lines)
        self._last_lines.extend(line for line in lines if line.strip())


async def _kill_session(process: Spawned) -> None:
    """End a command that was cut short, and whatever it left in its session."""
    if process.is_running:
        end_session(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            end_session(process.pid, signal.SIGKILL)
            await process.wait()
    end_session(process.pid, signal.SIGKILL)


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all to their end; when one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


async def wait_until(is_so: Callable[[], bool], *, within_s: float, every_s: float, otherwise: str) -> None:
    """Wait until `is_so()`. Raises CannotStart if it was not within `within_s`; says `otherwise`."""
    try:
        async with asyncio.timeout(within_s):
            while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - another process has the state
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise CannotStart(otherwise) from None
