"""Whatever ends a test session, what its tests started ends with it: engines, detached processes, servers, workers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.session_guard import holds_within

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240.0
AGAIN_AFTER_S = 20.0
INTERRUPTED = """
import json, os, subprocess, sys, tempfile, threading
from tests.engine_agent.engines.sim.cells import running_cell

DETACHED = "import os, time; os.setsid(); (pid := os.fork()) and (print(pid), os._exit(0)); time.sleep(600)"

def test_that_is_interrupted(tmp_path):
    with running_cell(tmp_path, 0) as (engine,):
        detached = subprocess.run([sys.executable, "-uc", DETACHED], stdout=open(tmp_path / "pid", "w"))
        pids = [os.getpid(), engine.process.pid, int((tmp_path / "pid").read_text())]
        with open(os.environ["STARTED"] + ".part", "w") as file:
            json.dump({"pids": pids, "folder": tempfile.gettempdir()}, file)
        os.rename(file.name, os.environ["STARTED"])
        threading.Event().wait(600)
"""


@dataclass
class Session:
    """A pytest whose only test has started an engine and a detached process, and waits."""

    pytest: subprocess.Popen[bytes]
    test_process: psutil.Process
    started: list[psutil.Process]
    folder: Path


def interrupted_session(home: Path) -> Session:
    test, started = home / "test_interrupted.py", home / "started.json"
    test.write_text(INTERRUPTED)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SWITCHYARD_"))}
    environment = {**kept, "STARTED": str(started), "PYTHONPATH": str(ROOT)}
    for name in ("DATABASE_URL", "REDIS_URL", "PGOPTIONS", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    command += ["-n", "1", "--max-worker-restart", "0"]
    with (home / "session.log").open("wb") as log, interruptible():
        process = subprocess.Popen(
            [*command, str(test)], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    holds_within(lambda: started.exists() or process.poll() is not None, LIMIT_S)
    assert started.exists(), (home / "session.log").read_text()
    facts = json.loads(started.read_text())
    test_process, *others = (psutil.Process(pid) for pid in facts["pids"])
    servers = [child for child in test_process.children(recursive=True) if child not in others]
    return Session(process, test_process, [*others, *servers], Path(facts["folder"]))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What starts meanwhile hears Ctrl-C, as at a terminal: a shell has what it starts with `&` ignore it, and so would
    all that starts from there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.long), pytest.param(signal.SIGKILL, id="kill -9")],
)
def test_a_session_that_ends_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    session = interrupted_session(tmp_path)
    os.killpg(session.pytest.pid, how) if how is signal.SIGINT else session.pytest.send_signal(how)
    while session.pytest.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            session.pytest.wait(AGAIN_AFTER_S)
            break
        os.killpg(session.pytest.pid, signal.SIGINT)  # like Ctrl-C at a terminal, which signals the whole group
    assert session.pytest.returncode != 0
    nothing_is_left(session)


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_nothing_and_fails_the_session(tmp_path: Path) -> None:
    session = interrupted_session(tmp_path)
    session.test_process.kill()
    nothing_is_left(session)
    assert session.pytest.wait(LIMIT_S) != 0


def nothing_is_left(session: Session) -> None:
    watched = [session.test_process, *session.started]
    holds_within(lambda: not session.folder.exists() and not any(is_alive(each) for each in watched), LIMIT_S)
    assert [each for each in watched if is_alive(each)] == []
    assert not session.folder.exists()


def is_alive(process: psutil.Process) -> bool:
    """Not when only its parent has yet to ask for its exit status."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
