"""A small laboratory, and what a test does with its hosts."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.hosts import client
from lab.hosts.conditions import Lost
from lab.hosts.file_tree import START_AT_BOOT
from lab.hosts.places import CHECKOUT, Places, read_places
from lab.hosts.topology import Topology
from tests.controlplane.embedded import processes

ROUND_TRIP_S = 0.02
WITHIN_S = 60.0
ECHO = """#!/bin/sh
exec python3 -S -c '
import socket, threading
heard = open("/var/lib/heard", "a", buffering=1)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("", 7000))
def listen():
    while True: print(datagrams.recv(99).decode(), file=heard)
def echo(connection):
    while said := connection.recv(99): connection.sendall(said)
threading.Thread(target=listen, daemon=True).start()
server = socket.create_server(("", 7000))
while True: threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
'
"""
ASK = """
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
print(time.monotonic() - began)
connection.sendall(b"why?")
assert connection.recv(99) == b"why?"
"""
SEND = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""
RUN = """
import sys
from lab.hosts import client, places
sys.exit(client.run_on(places.read_places(), sys.argv[1], sys.argv[2:]))
"""
NOT_REACHED_AFTER_S = 0.5
"""Longer than any way through the laboratory: that nothing comes can only be waited for."""


class Lab:
    """A laboratory that runs. `environment`: of the command `lab`."""

    def __init__(self, places: Places, environment: dict[str, str]) -> None:
        self.places = places
        self._environment = environment

    def command(self, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        """The command `lab`, with its output."""
        return subprocess.run(
            [python, "-m", "lab.hosts.cli", *arguments],
            cwd=CHECKOUT, env=self._environment, capture_output=True, text=True, check=False, timeout=WITHIN_S,
        )  # fmt: skip

    def do(self, *arguments: str) -> str:
        done = self.command(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, do: str, **arguments: object) -> None:
        """What the command asks of the laboratory, without the time that a command takes to start."""
        client.ask(self.places, do, **arguments)

    def cut(self, name: str, other: str | None = None, lost: Lost = Lost.BOTH) -> None:
        self.ask("cut", name=name, other=other, lost=lost)

    def heal(self) -> None:
        self.ask("heal", name=None)

    def run(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        """As `lab exec`, without that time."""
        return subprocess.run(
            [sys.executable, "-S", "-c", RUN, host, *command],
            cwd=CHECKOUT, env=self._environment, capture_output=True, text=True, check=False, timeout=WITHIN_S,
        )  # fmt: skip

    def python(self, host: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(host, "python3", "-S", "-c", program, *arguments)

    def address(self, host: str) -> str:
        return str(client.topology_of(self.places).host(host).address)

    def reaches(self, source: str, destination: str) -> bool:
        """Whether a connection is answered; one try."""
        done = self.python(source, ASK, self.address(destination), str(NOT_REACHED_AFTER_S))
        assert done.returncode == 0 or "timed out" in done.stderr or "refused" in done.stderr, done.stderr
        return done.returncode == 0

    def connects_s(self, source: str, destination: str) -> float:
        """Seconds that a connection took to be made: one round trip."""
        done = self.python(source, ASK, self.address(destination), str(WITHIN_S / 2))
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    def tell(self, source: str, destination: str, word: str) -> None:
        assert self.python(source, SEND, self.address(destination), word).returncode == 0

    def heard(self, host: str) -> list[str]:
        """Datagrams that a host got, read from its disk."""
        return (self.places.files_of(host) / "var/lib/heard").read_text().split()


def eventually(is_so: Callable[[], object], what: str) -> None:
    """Wait for it.

    Raises:
        AssertionError: it did not come.
    """
    assert processes.eventually(lambda: bool(is_so()), within_s=WITHIN_S), what


def places_in(folder: Path) -> tuple[Places, dict[str, str]]:
    """Places below a folder, and the environment that says so."""
    environment = {"SWITCHYARD_HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return read_places(environment), environment


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """c1; n1 and n2 in us-east-1, n3 and n4 in us-west-2, with what they start at boot."""
    places, environment = places_in(tmp_path_factory.mktemp("lab"))
    topology = Topology(controls=1, ingresses=0, nodes=2, round_trip_s=ROUND_TRIP_S)
    for name in topology.hosts:
        script = places.files_of(name) / "etc/changes" / Path(START_AT_BOOT).name / "echo.start"
        script.parent.mkdir(parents=True)
        script.write_text(ECHO)
        script.chmod(0o755)
    client.start(topology, places)
    running = Lab(places, environment)
    try:
        for name in topology.hosts:
            eventually(lambda name=name: running.reaches(name, name), f"{name} listens")  # type: ignore[misc]
        yield running
    finally:
        client.stop(places)
