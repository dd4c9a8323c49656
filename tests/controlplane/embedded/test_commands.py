"""The launcher as `make` calls it, where it must not start anything or must end what others left."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.embedded.process_ownership import processes_of
from controlplane.embedded.processes import HOME_MARK
from tests.controlplane.embedded.processes import ROOT, eventually

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return (tmp_path / "home").resolve()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _launcher(command: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "controlplane.embedded", *command.split()],
        cwd=ROOT,
        env={**os.environ, "SWITCHYARD_HOME": str(home), "ENGINE": "sim", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["up", "up --detach"])
def test_a_taken_port_ends_up_with_one_sentence_and_nothing_running(command: str, home: Path, taken_port: int) -> None:
    ended = _launcher(command, home, SWITCHYARD_PORT=str(taken_port))
    assert ended.returncode == 1
    assert f"Port {taken_port} for the dashboard is taken by process" in ended.stdout.splitlines()[-1]
    assert eventually(lambda: processes_of(home) == [])


def test_a_bad_variable_ends_up_before_anything_is_touched(home: Path) -> None:
    ended = _launcher("up", home, SWITCHYARD_PORT="eighty")
    assert ended.returncode == 1
    assert ended.stderr == "SWITCHYARD_PORT is 'eighty': give a port from 1 to 65535.\n"
    assert not home.exists()


def test_down_ends_what_a_killed_launcher_left_and_may_be_repeated(home: Path) -> None:
    home.mkdir()
    left = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, HOME_MARK: str(home)})
    with left:
        assert eventually(lambda: [process.pid for process in processes_of(home)] == [left.pid])
        ended = _launcher("down", home)
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-1] == f"up       | nothing of {home} runs"
    assert _launcher("down", home).returncode == 0


def test_down_stops_living_servers_in_order(home: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "controlplane.embedded", "servers", "--not-durable"],
        cwd=ROOT,
        env={**os.environ, "SWITCHYARD_HOME": str(home), "DATABASE_URL": "", "REDIS_URL": "", HOME_MARK: str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as servers:
        assert servers.stdout is not None
        assert servers.stdout.readline()
        assert _launcher("down", home).returncode == 0
    assert processes_of(home) == []


def test_status_of_a_home_where_nothing_runs_says_how_to_start_and_loads_no_client(home: Path) -> None:
    ended = _launcher("status", home, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == 3
    assert ended.stdout == f"Nothing of {home} runs. `make up` starts it.\n"
    assert {"psycopg", "redis"} & {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()} == set()
