"""The launcher's services over minutes of virtual time, in which they die, do not start, cannot be noted and do not
stop when asked, while the launcher itself is paused and wakes up late.

    SWITCHYARD_SEEDS=5000 pytest tests/controlplane/embedded/test_services_over_time.py
"""

import asyncio
import itertools
import os
import random
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.embedded import supervisor
from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.processes import Program
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import LONGEST_S, Service, Supervisor, wait_before_restart_s
from tests.controlplane.embedded.processes import prepared_home, silent_console

SEEDS = range(int(os.environ.get("SWITCHYARD_SEEDS", "40")))
TROUBLE_S = 120.0
STOP_WITHIN_S = 10.0


class _JumpingSelector(selectors.SelectSelector):
    """Advances the virtual clock by the wait instead of sleeping, and at times by more, as on a host that was
    paused."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.late_s: Callable[[], float] = float

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could wake the launcher"
        self.now_s += timeout + (self.late_s() if timeout > 0 else 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self.clock = _JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


@dataclass
class FakeProcess:
    """A process of one service. A deaf one hears SIGKILL only."""

    name: str
    pid: int
    is_deaf: bool
    status: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.status is None

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.status is not None
        return self.status

    async def read(self) -> bytes:
        """Never returns, because another process may keep the output open."""
        await asyncio.Event().wait()
        return b""

    def send_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL or not self.is_deaf:
            self.end(-number)

    def end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.ended.set()

    def close(self) -> None:
        assert not self.is_running, "its output is closed while it runs"


class World:
    """Replaces the host: its processes and their failures, drawn from `seed`."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.draw = random.Random(seed)
        self.loop = loop
        self.processes: list[FakeProcess] = []
        self.starts: dict[str, list[float]] = {}
        self.trouble = True
        loop.clock.late_s = lambda: self.draw.choice((0.0, 0.0, 0.0, 0.5, 5.0, 60.0)) if self._is(0.05) else 0.0

    async def spawn(self, program: Program) -> FakeProcess:
        """In place of `processes.spawn`."""
        name = program.arguments[0]
        self.starts.setdefault(name, []).append(self.loop.time())
        if self._is(0.2):
            raise OSError("no process can be made")
        await asyncio.sleep(self.draw.uniform(0.0, 0.2))
        assert not self.alive(name), f"a second {name} beside {self.alive(name)}"
        process = FakeProcess(name, 1000 + len(self.processes), is_deaf=self._is(0.2))
        self.processes.append(process)
        if self._is(0.5):
            self.loop.call_later(self.draw.uniform(0.0, 40.0), self._end, process)
        return process

    def _end(self, process: FakeProcess) -> None:
        if self.trouble:
            process.end(self.draw.choice((0, 1, -9)))

    async def prepare(self) -> None:
        if self._is(0.1):
            raise CannotStart("what it needs is not there")

    def noted(self, sessions: dict[str, int]) -> None:
        if self._is(0.3):
            raise OSError("no space left on device")

    def end_session(self, session: int, number: int) -> None:
        for process in self.processes:
            if process.pid == session:
                process.send_signal(signal.Signals(number))

    def alive(self, name: str) -> list[FakeProcess]:
        return [process for process in self.processes if process.name == name and process.is_running]

    def _is(self, probability: float) -> bool:
        return self.trouble and self.draw.random() < probability


def program(name: str) -> Program:
    return Program(arguments=(name,), environment={}, folder=Path("/"))


async def _live(world: World, home: StateDirectory) -> None:
    kept = Supervisor(home, silent_console(), on_change=world.noted)
    names = ("web", "worker", "jobs")
    for name in names:
        service = Service(name, program(name), stop_within_s=STOP_WITHIN_S, prepare=world.prepare)
        while not await _starts(kept, service):  # noqa: ASYNC110 - nothing tells when it may be tried
            await asyncio.sleep(1.0)  # as an operator who tries again
    await asyncio.sleep(TROUBLE_S)

    world.trouble = False
    await asyncio.sleep(LONGEST_S + 1.0)
    assert all(len(world.alive(name)) == 1 for name in names), "a service is away though nothing is wrong any more"
    settled = len(world.processes)

    began = asyncio.get_running_loop().time()
    await kept.stop_all()
    assert not [process for process in world.processes if process.is_running], "something runs on"
    assert len(world.processes) == settled, "something was started while all was stopped"
    assert asyncio.get_running_loop().time() - began <= len(names) * (STOP_WITHIN_S + 2.0)


async def _starts(kept: Supervisor, service: Service) -> bool:
    try:
        await kept.start(service)
    except (CannotStart, OSError):
        await kept.stop(service.name)
        return False
    return True


def _pauses_kept(starts: list[float]) -> bool:
    """After the first, whatever happens: never more starts than the backoff allows."""
    shortest = wait_before_restart_s(1)
    return all(later - earlier >= shortest for earlier, later in itertools.pairwise(starts))


def test_each_service_runs_once_comes_back_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = prepared_home(tmp_path / "home")
    for seed in SEEDS:
        loop = VirtualLoop()
        world = World(seed, loop)
        replaced: dict[str, Any] = {"spawn": world.spawn, "end_session": world.end_session}
        for name, stand_in in replaced.items():
            monkeypatch.setattr(supervisor, name, stand_in)
        try:
            loop.run_until_complete(_live(world, home))
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            loop.close()
        assert all(_pauses_kept(starts) for starts in world.starts.values()), f"seed {seed}: starts without a pause"
