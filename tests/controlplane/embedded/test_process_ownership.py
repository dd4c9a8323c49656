import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.process_ownership import belongs, end_all, in_sessions, processes_of
from controlplane.embedded.processes import HOME_MARK
from tests.controlplane.embedded.processes import eventually

Start = Callable[..., psutil.Process]

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*arguments: str, code: str = SLEEP, **environment: str) -> psutil.Process:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            if code is DEAF:
                assert process.stdout is not None
                process.stdout.readline()
            found = psutil.Process(process.pid)
            assert eventually(lambda: SLEEP in found.cmdline() or DEAF in found.cmdline())
            return found

        yield start


def test_whoever_carries_the_mark_of_the_home_belongs_to_it(start: Start, tmp_path: Path) -> None:
    process = start(**{HOME_MARK: str(tmp_path)})
    assert belongs(process, tmp_path)
    assert not belongs(process, tmp_path / "other")
    assert [found.pid for found in processes_of(tmp_path)] == [process.pid]


def test_a_node_of_the_home_belongs_to_it(start: Start, tmp_path: Path) -> None:
    assert belongs(start(SWITCHYARD_NODE_ID="n-00000001", SWITCHYARD_HOME=str(tmp_path)), tmp_path)


def test_a_shell_in_which_the_home_is_set_does_not_belong_to_it(start: Start, tmp_path: Path) -> None:
    assert not belongs(start(SWITCHYARD_HOME=str(tmp_path)), tmp_path)


def test_neither_the_caller_nor_its_ancestors_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from controlplane.embedded.process_ownership import processes_of\n"
        "print(len(processes_of(Path(sys.argv[1]))))"
    )
    monkeypatch.setenv(HOME_MARK, str(tmp_path))
    shell = f"{sys.executable} -c '{program}' {tmp_path}; exit"
    found = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "0\n"


def test_sessions_tell_the_launchers_own_from_the_agents(start: Start, tmp_path: Path) -> None:
    first, second = (start(**{HOME_MARK: str(tmp_path)}) for _ in range(2))
    assert in_sessions([first, second], [first.pid, 1]) == [first]


def test_ending_asks_first_and_kills_the_deaf(start: Start, tmp_path: Path) -> None:
    processes = [start(code=code, **{HOME_MARK: str(tmp_path)}) for code in (SLEEP, DEAF)]
    assert end_all(lambda: processes_of(tmp_path), patience_s=0.5) == 0
    assert all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)
