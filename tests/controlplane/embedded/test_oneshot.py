import io
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.console import Console
from controlplane.embedded.processes import OneshotResult, require_oneshot, run_oneshot
from tests.controlplane.embedded.processes import eventually_async, prepared_home, python_program, silent_console

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


async def test_it_is_shown_and_logged_and_its_last_line_is_the_answer(tmp_path: Path) -> None:
    home, screen = prepared_home(tmp_path), io.StringIO()
    program = python_program("print('working'); print('done'); print()", home)
    outcome = await run_oneshot("seed", program, home, Console(screen), deadline_s=30)
    assert outcome == OneshotResult(status=0, last_lines=("working", "done"))
    assert screen.getvalue().startswith("seed     | working\nseed     | done\n")
    assert (home.logs / "seed.log").read_text() == "working\ndone\n\n"


async def test_a_failure_says_its_last_line_and_where_the_rest_is(tmp_path: Path) -> None:
    home = prepared_home(tmp_path)
    program = python_program("raise SystemExit('no such table')", home)
    with pytest.raises(CannotStart) as failure:
        await require_oneshot("migrate", program, home, silent_console(), deadline_s=30)
    log = home.logs / "migrate.log"
    assert str(failure.value) == f"migrate failed (no such table); the whole story is in {log}."


async def test_a_quiet_command_that_fails_shows_what_it_last_wrote(tmp_path: Path) -> None:
    home, screen = prepared_home(tmp_path), io.StringIO()
    program = python_program("import sys; print('no space'); print('removing files'); sys.exit(1)", home)
    with pytest.raises(CannotStart, match="removing files"):
        await require_oneshot("initdb", program, home, Console(screen), deadline_s=30, quiet=True)
    assert "no space" in screen.getvalue()


async def test_one_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    home = prepared_home(tmp_path)
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(600)"
    )
    note = tmp_path / "child"
    program = python_program(code, home, str(note))
    with pytest.raises(CannotStart, match="engine was not done after 2 s"):
        await run_oneshot("engine", program, home, silent_console(), deadline_s=2)
    child = int(note.read_text())
    assert await eventually_async(lambda: not psutil.pid_exists(child))
