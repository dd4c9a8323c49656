import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.control_plane import Gate
from controlplane.embedded.processes import Spawned, spawn
from tests.controlplane.embedded.processes import eventually_async, prepared_home, python_program

pytestmark = pytest.mark.asyncio

SLEEP = "import time; time.sleep(600)"


async def test_a_program_leads_a_session_of_its_own_and_says_what_it_says(tmp_path: Path) -> None:
    process = await spawn(python_program("import os; print(f'{os.getsid(0)} {os.getpid()}')", prepared_home(tmp_path)))
    session, pid = (await process.read()).split()
    assert int(session) == int(pid) == process.pid
    assert await process.wait() == 0
    process.close()


async def test_its_end_is_seen_while_a_child_still_holds_its_output(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '{SLEEP}']).pid)"
    process = await spawn(python_program(code, prepared_home(tmp_path)))
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    psutil.Process(int(await process.read())).kill()
    process.close()


@pytest.mark.parametrize("steps", range(6))
async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path, steps: int) -> None:
    starting = asyncio.create_task(spawn(python_program(SLEEP, prepared_home(tmp_path))))
    for _ in range(steps):
        await asyncio.sleep(0)
    starting.cancel()
    ended = (await asyncio.gather(starting, return_exceptions=True))[0]
    if not isinstance(ended, BaseException):  # it was started before the cancellation came
        psutil.Process(ended.pid).kill()
        await ended.wait()
        ended.close()
    assert await eventually_async(lambda: not _children_that_sleep())


def _children_that_sleep() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and SLEEP in child.cmdline()]


@pytest.mark.parametrize("opens", [True, False])
async def test_a_process_works_only_once_the_launcher_has_prepared_the_database(tmp_path: Path, opens: bool) -> None:
    prepared, gate = tmp_path / "prepared", Gate(tmp_path / "gate")
    wait = "from controlplane.processes import wait_for_database as wait; import os; os.write(1, b'.'); wait()"
    code = f"{wait}; print(os.path.exists({str(prepared)!r}), 'SWITCHYARD_GATE' in os.environ)"
    process = await spawn(python_program(code, prepared_home(tmp_path / "home"), environment=gate.environment))
    assert await process.read() == b"."
    prepared.touch()
    gate.open() if opens else gate._file.close()
    said = b"True False" if opens else b"the launcher ended before the database was ready"
    assert b"".join([piece async for piece in _pieces(process)]).strip() == said
    assert await process.wait() == int(not opens)
    process.close()


async def _pieces(process: Spawned) -> AsyncIterator[bytes]:
    while piece := await process.read():
        yield piece
