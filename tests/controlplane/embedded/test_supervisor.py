import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from controlplane.embedded import supervisor
from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service, Supervised
from tests.controlplane.embedded.processes import eventually_async, prepared_home, python_program, silent_console

pytestmark = pytest.mark.asyncio

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT_OF_ORPHANS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def home(tmp_path: Path) -> StateDirectory:
    return prepared_home(tmp_path / "home")


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "wait_before_restart_s", lambda _: 0.0)


async def _nothing() -> None:
    return


@asynccontextmanager
async def running(
    code: str, home: StateDirectory, *, prepare: Callable[[], Awaitable[None]] = _nothing, stop_within_s: float = 10.0
) -> AsyncIterator[tuple[Supervised, list[int]]]:
    pids: list[int] = []
    service = Service("web", python_program(code, home), prepare=prepare, stop_within_s=stop_within_s)
    kept = Supervised(service, home, silent_console(), on_start=lambda _, pid: pids.append(pid))
    await kept.start()
    try:
        yield kept, pids
    finally:
        await kept.stop()


async def test_a_process_that_dies_is_started_again(home: StateDirectory) -> None:
    async with running(SLEEP, home) as (kept, pids):
        assert await eventually_async(lambda: kept.last_line == "up")
        psutil.Process(pids[0]).kill()
        assert await eventually_async(lambda: len(pids) == 2)
        assert kept.deaths == 1
    assert not psutil.pid_exists(pids[1])


async def test_what_it_prepares_is_prepared_for_every_start(home: StateDirectory) -> None:
    prepared: list[int] = []

    async def prepare() -> None:
        prepared.append(1)

    async with running("raise SystemExit(3)", home, prepare=prepare) as (kept, _):
        assert await eventually_async(lambda: len(prepared) >= 3)
        assert kept.deaths >= 2


async def test_a_later_start_that_is_impossible_is_tried_again(home: StateDirectory) -> None:
    attempts: list[int] = []

    async def prepare() -> None:
        attempts.append(1)
        if len(attempts) == 2:
            raise CannotStart("no room")

    async with running("raise SystemExit(3)", home, prepare=prepare):
        assert await eventually_async(lambda: len(attempts) >= 3)


async def test_what_could_not_be_noted_runs_all_the_same_and_once(home: StateDirectory) -> None:
    pids: list[int] = []

    def disk_refuses(_: str, pid: int) -> None:
        pids.append(pid)
        raise OSError("no space left on device")

    kept = Supervised(Service("sender", python_program(SLEEP, home)), home, silent_console(), on_start=disk_refuses)
    await kept.start()
    try:
        assert await eventually_async(lambda: kept.last_line == "up")
        psutil.Process(pids[0]).kill()
        assert await eventually_async(lambda: len(pids) == 2)
        assert await eventually_async(lambda: kept.pid == pids[1]), "the second one is held, so no third one starts"
        psutil.Process(pids[1]).kill()
        assert await eventually_async(lambda: len(pids) == 3)
        assert not any(psutil.pid_exists(pid) for pid in pids[:2])
    finally:
        await kept.stop()
    assert not psutil.pid_exists(pids[2])


async def test_what_hears_nothing_is_asked_harder_before_it_is_killed(home: StateDirectory) -> None:
    service = Service(
        "web", python_program(DEAF, home), stop_within_s=0.1, then=((signal.SIGUSR1, 30.0),)
    )  # fmt: skip
    kept = Supervised(service, home, silent_console(), on_start=lambda _, __: None)
    await kept.start()
    assert await eventually_async(lambda: kept.last_line == "up")
    pid = kept.pid
    await kept.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_its_output_lies_in_its_log(home: StateDirectory) -> None:
    async with running("import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(600)", home):
        log = home.logs / "web.log"
        assert await eventually_async(lambda: "err" in log.read_text())


async def test_one_that_does_not_stop_in_time_is_killed(home: StateDirectory) -> None:
    async with running(DEAF, home, stop_within_s=0.1) as (kept, pids):
        assert await eventually_async(lambda: kept.last_line == "up")
    assert not psutil.pid_exists(pids[0])


async def test_what_a_killed_process_left_in_its_session_ends_with_it(home: StateDirectory) -> None:
    async with running(PARENT_OF_ORPHANS, home) as (kept, pids):
        assert await eventually_async(lambda: kept.last_line > "")
        orphan = psutil.Process(int(kept.last_line))
        psutil.Process(pids[0]).send_signal(signal.SIGKILL)
        assert await eventually_async(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)


async def test_stopping_one_that_waits_to_be_started_again_is_at_once(
    home: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "wait_before_restart_s", lambda _: 3600.0)
    async with asyncio.timeout(60):
        async with running("raise SystemExit(3)", home) as (kept, _):
            assert await eventually_async(lambda: kept.deaths == 1)
