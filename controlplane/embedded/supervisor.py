"""The services of one launcher: each always runs, is started again with backoff when it dies, and is stopped in time;
together they are started one by one and stopped in the opposite order."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.console import Console, LineSplitter, RotatingLog
from controlplane.embedded.processes import Program, Spawned, end_session, spawn
from controlplane.embedded.state_directory import StateDirectory

FIRST_S = 0.5
LONGEST_S = 10.0
STEADY_AFTER_S = 30.0
"""A process that ran this long counts as recovered: its next death starts the backoff anew."""


def deaths_in_a_row(previous: int, ran_s: float) -> int:
    """Quick deaths in a row, this one included, after a run of `ran_s` seconds."""
    return 1 if ran_s >= STEADY_AFTER_S else previous + 1


def wait_before_restart_s(deaths: int) -> float:
    """Seconds to wait after the `deaths`-th quick death in a row (1, 2, …): doubles from 0.5 up to 10."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(deaths - 1, 16))


_OUTPUT_DRAIN_S = 1.0
"""How long a dead process's output is still read: its children may keep the pipe open."""


async def _nothing_to_prepare() -> None:
    """Most services need nothing made ready."""


@dataclass(frozen=True, slots=True)
class Service:
    """A process that must always run. `prepare` runs before every start, the first and each later one."""

    name: str
    program: Program
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within_s: float = 10.0
    then: tuple[tuple[signal.Signals, float], ...] = ()
    """Harder ways to ask, in turn, each with the seconds that it has; SIGKILL follows the last."""
    prepare: Callable[[], Awaitable[None]] = _nothing_to_prepare


class Supervised:
    """Keeps one service running from `start` until `stop`."""

    def __init__(
        self, service: Service, home: StateDirectory, console: Console, *, on_start: Callable[[str, int], None]
    ) -> None:
        self.service = service
        self.deaths = 0
        """Quick deaths in a row, as of the last one."""
        self.last_line = ""
        self._console = console
        self._log = RotatingLog(home.logs / f"{service.name}.log")
        self._on_start = on_start
        self._process: Spawned | None = None
        self._reading: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.is_running else None

    async def start(self) -> None:
        """Start it and keep it running. Raises CannotStart or OSError if the first start was not possible at all."""
        await self._launch()
        self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.service.name}")

    async def stop(self) -> None:
        """Stop it for good: its signal, then SIGKILL after its deadline; nothing of its session is left."""
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process:
            await self._stop_process(self._process)
        self._log.close()

    async def _stop_process(self, process: Spawned) -> None:
        name, asked = self.service.name, ((self.service.stop_signal, self.service.stop_within_s), *self.service.then)
        for number, within_s in asked:
            process.send_signal(number)
            try:
                await asyncio.wait_for(process.wait(), within_s)
                break
            except TimeoutError:
                self._console.own(f"{name} did not stop within {within_s:g} s of {number.name}")
        else:
            self._console.own(f"{name} is killed")
            end_session(process.pid, signal.SIGKILL)
        await self._after_death(process)

    async def _launch(self) -> None:
        await self.service.prepare()
        self._process = await spawn(self.service.program)
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            self._on_start(self.service.name, self._process.pid)
        except OSError as error:  # it runs, and is ours: whatever could not be noted of it, no second one may start
            self._console.own(f"{self.service.name} runs as {self._process.pid}, which could not be noted: {error}")

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            status = await self._after_death(self._process) if self._process else None
            self.deaths = deaths_in_a_row(self.deaths, loop.time() - began)
            wait_s = wait_before_restart_s(self.deaths)
            self._console.own(f"{self.service.name} {_death(status)}; starting it again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            await self._relaunch()

    async def _relaunch(self) -> None:
        try:
            await self._launch()
        except (CannotStart, OSError) as error:  # the next round tries again
            self._process = None
            self.last_line = str(error)

    async def _after_death(self, process: Spawned) -> int:
        """Wait until `process` is dead, hear its last words, and end what it left in its session."""
        status = await process.wait()
        end_session(process.pid, signal.SIGKILL)
        if self._reading:
            await asyncio.wait([self._reading], timeout=_OUTPUT_DRAIN_S)
            self._reading.cancel()
        process.close()
        return status

    async def _read(self, process: Spawned) -> None:
        splitter = LineSplitter()
        while chunk := await process.read():
            self._show(splitter.feed(chunk))
        self._show(splitter.finish())

    def _show(self, lines: list[str]) -> None:
        self._log.write(lines)
        self._console.service_lines(self.service.name, lines)
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)


def _death(status: int | None) -> str:
    if status is None:
        return "did not start"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


CRASH_LOOP_AFTER_DEATHS = 5
"""Quick deaths in a row after which a first start is given up: 0.5 + 1 + 2 + 4 s of backoff lie between them."""
_WATCH_EVERY_S = 0.2


class Supervisor:
    """Holds every supervised process. `on_change` gets name -> pid (which is also the session) at every start."""

    def __init__(self, home: StateDirectory, console: Console, *, on_change: Callable[[dict[str, int]], None]) -> None:
        self._home = home
        self._console = console
        self._on_change = on_change
        self._running: dict[str, Supervised] = {}
        self._sessions: dict[str, int] = {}

    @property
    def runs_anything(self) -> bool:
        return bool(self._running)

    async def start(self, service: Service) -> None:
        supervised = Supervised(service, self._home, self._console, on_start=self._started)
        self._running[service.name] = supervised
        await supervised.start()

    async def stop(self, *names: str) -> None:
        """Stop these services, one after the other; those that do not run are skipped."""
        for name in names:
            if supervised := self._running.pop(name, None):
                await supervised.stop()

    async def stop_all(self) -> None:
        """Stop what still runs, the last started first."""
        await self.stop(*reversed(self._running))

    async def fail_when_crash_looping(self) -> NoReturn:
        """Return never; watch until a service keeps dying. Raises CannotStart if it does, and says why."""
        while True:
            for name, supervised in self._running.items():
                if supervised.deaths >= CRASH_LOOP_AFTER_DEATHS:
                    log = self._home.logs / f"{name}.log"
                    raise CannotStart(f"{name} keeps dying ({supervised.last_line}); the whole story is in {log}.")
            await asyncio.sleep(_WATCH_EVERY_S)

    def kill_all(self) -> None:
        for session in self._sessions.values():
            end_session(session, signal.SIGKILL)

    def _started(self, name: str, pid: int) -> None:
        self._sessions[name] = pid
        self._on_change(dict(self._sessions))
