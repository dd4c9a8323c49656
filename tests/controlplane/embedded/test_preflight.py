import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.embedded import preflight
from controlplane.embedded.configuration import CannotStart, read_configuration
from controlplane.embedded.preflight import (
    GIB,
    bind_problem,
    require_disk_space,
    require_distinct_ports,
    require_free_port,
    wanted_ports,
)
from engine_agent.ingress.haproxy import port_reserved
from engine_agent.protocol.ports import PortUse
from tests.ports import free_port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_its_variable_and_its_holder(taken_port: int, tmp_path: Path) -> None:
    with pytest.raises(CannotStart) as refusal:
        require_free_port(PortUse(taken_port, "the dashboard", "SWITCHYARD_PORT"), tmp_path)
    sentence = str(refusal.value)
    assert sentence.startswith(f"Port {taken_port} for the dashboard is taken by process {os.getpid()} (")
    assert sentence.endswith("free it, or set SWITCHYARD_PORT to another port.")


def test_a_port_that_our_own_process_holds_is_accepted(
    taken_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "belongs", lambda process, home: process.pid == os.getpid() and home == tmp_path)
    require_free_port(PortUse(taken_port, "the ingress", "SWITCHYARD_INGRESS_PORT"), tmp_path)


def test_a_port_that_another_fleet_shares_with_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy opens its port for sharing, so several processes may listen on one."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as ours:
        port = ours.getsockname()[1]
        with _listener_elsewhere(port) as other:
            monkeypatch.setattr(preflight, "belongs", lambda process, home: process.pid == os.getpid())
            with pytest.raises(CannotStart, match=f"Port {port} for the ingress is taken by process {other} "):
                require_free_port(PortUse(port, "the ingress", "SWITCHYARD_INGRESS_PORT"), tmp_path)


def test_a_port_that_another_ingress_is_about_to_take_is_refused(tmp_path: Path) -> None:
    port = free_port()
    with port_reserved("127.0.0.1", port, lambda: False), pytest.raises(CannotStart, match=f"process {os.getpid()} "):
        require_free_port(PortUse(port, "the ingress", "SWITCHYARD_INGRESS_PORT"), tmp_path)


@contextmanager
def _listener_elsewhere(port: int) -> Iterator[int]:
    """The pid of another process that shares this port."""
    program = (
        f"import socket; s = socket.create_server(('127.0.0.1', {port}), reuse_port=True); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def test_what_cannot_be_listened_on_is_known_with_its_reason(taken_port: int) -> None:
    free = free_port()
    assert bind_problem("127.0.0.1", free) is None
    problems = [bind_problem("127.0.0.1", taken_port), bind_problem("192.0.2.1", free)]
    assert [problem and problem.errno for problem in problems] == [errno.EADDRINUSE, errno.EADDRNOTAVAIL]


def test_every_port_that_people_use_is_checked() -> None:
    wanted = wanted_ports(read_configuration({"SWITCHYARD_INGRESS_PORT": "9000"}))
    assert [(each.port, each.variable) for each in wanted] == [
        (8000, "SWITCHYARD_PORT"),
        (8443, "SWITCHYARD_AGENT_PORT"),
        (9000, "SWITCHYARD_INGRESS_PORT"),
        (9001, "SWITCHYARD_INGRESS_PORT"),
    ]


def test_one_port_cannot_serve_two_purposes() -> None:
    with pytest.raises(CannotStart, match="Port 8081 is for the dashboard and for applications of the ingress"):
        require_distinct_ports(read_configuration({"SWITCHYARD_PORT": "8081"}))
    with pytest.raises(CannotStart, match="Port 8080 is for agents and for applications of the ingress i-us-east-1"):
        require_distinct_ports(read_configuration({"SWITCHYARD_AGENT_PORT": "8080"}))


@pytest.mark.parametrize(
    ("engine", "free_gib", "sentence"),
    [
        ("sim", 0.5, "home has 0.5 GiB free and 1 GiB are needed: make room, or set SWITCHYARD_HOME"),
        ("vllm", 5.0, "cache has 5.0 GiB free and 6 GiB are needed: make room, or set SWITCHYARD_CACHE"),
    ],
)
def test_a_disk_without_room_is_named(
    engine: str, free_gib: float, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free_gib * GIB)))
    environment = {"SWITCHYARD_HOME": f"{tmp_path}/home", "SWITCHYARD_CACHE": f"{tmp_path}/cache", "ENGINE": engine}
    with pytest.raises(CannotStart, match=sentence):
        require_disk_space(read_configuration(environment))


@pytest.mark.parametrize("engine", ["sim", "llama-cpp", "triton"])
def test_engines_other_than_vllm_need_little_room(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * GIB))
    environment = {"SWITCHYARD_HOME": str(tmp_path), "SWITCHYARD_CACHE": str(tmp_path), "ENGINE": engine}
    assert require_disk_space(read_configuration(environment)) == 2.0
