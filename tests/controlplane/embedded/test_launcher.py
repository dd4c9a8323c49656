"""The launcher with a slow fleet, a full disk or a silent server. It starts no process here."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from controlplane.embedded.configuration import CannotStart, read_configuration
from controlplane.embedded.console import Console
from controlplane.embedded.control_plane import Management
from controlplane.embedded.launcher import Launcher
from controlplane.embedded.processes import OneshotResult
from controlplane.embedded.state_directory import LauncherPhase, StateDirectory
from tests.controlplane.embedded.processes import prepared_home


@pytest.fixture
def home(tmp_path: Path) -> StateDirectory:
    return prepared_home(tmp_path / "home")


def launcher_of(home: StateDirectory, screen: io.StringIO) -> Launcher:
    configuration = read_configuration({"SWITCHYARD_HOME": str(home.path), "ENGINE": "sim"})
    return Launcher(configuration, home, Console(screen), foreground=False)


class SlowFleet(Management):
    """Looks that end late, then one that sees every cell ready."""

    def __init__(self, home: StateDirectory) -> None:
        super().__init__({}, home, Console(io.StringIO()))
        self._looks: Iterator[OneshotResult | CannotStart] = iter(
            [CannotStart("fleet was not done after 60 s"), OneshotResult(1, ("1 of 5 cells",)), OneshotResult(0, ())]
        )

    async def wait_for_cells(self, wait_s: float) -> OneshotResult:
        look = next(self._looks)
        if isinstance(look, CannotStart):
            raise look
        return look


@pytest.mark.asyncio
async def test_a_fleet_that_is_slow_is_left_running_as_promised(home: StateDirectory) -> None:
    screen = io.StringIO()
    await launcher_of(home, screen)._wait_for_cells(SlowFleet(home))
    shown = screen.getvalue()
    assert "(fleet was not done after 60 s); still trying" in shown
    assert "(1 of 5 cells); still trying" in shown
    state = home.read_state()
    assert state is not None
    assert state.phase is LauncherPhase.READY


class Servers:
    """Servers that answer immediately."""

    def __init__(self) -> None:
        self.asked = 0

    async def wait_until_ready(self) -> None:
        self.asked += 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("failures", "starts"), [(1, True), (2, False)])
async def test_a_step_that_failed_is_taken_once_more_when_the_servers_answer(
    home: StateDirectory, failures: int, starts: bool
) -> None:
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise CannotStart("resume failed (the server closed the connection).")

    screen, servers = io.StringIO(), Servers()
    taking = launcher_of(home, screen)._despite_database(cast("Any", servers), step)
    if starts:
        await taking
    else:
        with pytest.raises(CannotStart, match="resume failed"):
            await taking
    assert (tries, servers.asked) == (2, 1)
    assert "the server closed the connection" in screen.getvalue()


@pytest.mark.asyncio
@pytest.mark.parametrize("adopts", [True, False])
async def test_a_start_that_fails_takes_down_its_own_fleet_and_not_one_that_it_found(
    home: StateDirectory, monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    ended: list[str] = []

    async def stop_fleet(_: Management) -> None:
        ended.append("fleet")

    def end_processes() -> int:
        ended.append("processes")
        return 0

    launcher = launcher_of(home, io.StringIO())

    async def fail() -> None:
        launcher._fleet_may_run, launcher._adopts_fleet = True, adopts
        raise CannotStart("resume failed.")

    monkeypatch.setattr(Management, "stop_fleet", stop_fleet)
    monkeypatch.setattr(launcher, "_bring_up", fail)
    monkeypatch.setattr(launcher, "_end_leftover_processes", end_processes)
    assert await launcher.run() == 1
    assert ended == ([] if adopts else ["fleet", "processes"])


def test_a_disk_that_refuses_the_state_stops_nothing(home: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    screen = io.StringIO()
    launcher = launcher_of(home, screen)
    monkeypatch.setattr(home, "write_state", refuse)
    launcher._publish(sessions={"web": 7})
    assert "no space left on device; `make status` shows an older state" in screen.getvalue()
