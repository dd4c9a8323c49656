"""However a laboratory ends, nothing of it is left; and it needs no rights to begin."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil
import pytest

from lab.hosts import client
from lab.hosts.places import CHECKOUT
from lab.hosts.topology import NoLaboratory, Topology
from tests.lab.hosts.conftest import Lab, eventually, places_in
from tests.ports import free_port

pytestmark = pytest.mark.processes

SMALL = ("--bare", "--controls", "1", "--nodes", "1", "--ingresses", "0", "--region", "us-east-1")
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
REQUIRED_NAME = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    places, environment = places_in(tmp_path)
    yield Lab(places, environment)
    client.stop(places)


def start_in_foreground(lab: Lab) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-m", "lab.hosts.cli", "up", *SMALL],
        cwd=CHECKOUT, env={"SWITCHYARD_HOME": str(lab.places.home.parent), "PATH": "/usr/sbin:/usr/bin"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout
    assert "2 hosts run" in started.stdout.readline()
    return started


def left(lab: Lab) -> list[str]:
    """Processes with this laboratory's folder in their environment, and mounts below it."""
    home, found = str(lab.places.home.parent), []
    for process in psutil.process_iter():
        try:
            found += [str(process)] if process.environ().get("SWITCHYARD_HOME") == home else []
        except psutil.Error:
            continue
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if home in line]


def test_ctrl_c_ends_it(lab: Lab) -> None:
    started = start_in_foreground(lab)
    assert left(lab)
    started.send_signal(signal.SIGINT)

    started.communicate(timeout=60)
    assert left(lab) == []


def test_after_a_kill_of_what_started_it_the_next_down_ends_it(lab: Lab) -> None:
    started = start_in_foreground(lab)
    started.kill()
    started.communicate(timeout=60)
    assert "on" in lab.do("status")

    assert lab.do("down", "--wipe") == "The laboratory has ended.\n"
    assert left(lab) == []
    assert not (lab.places.home / "hosts").exists()
    assert lab.do("down") == "No laboratory ran.\n"
    assert "No laboratory runs in" in lab.command("status").stderr


def test_when_its_own_process_is_killed_all_hosts_end_with_it(lab: Lab) -> None:
    client.start(Topology(("us-east-1",), controls=1, nodes=1, ingresses=0), lab.places)
    [laboratory] = client.pids(lab.places)
    os.kill(laboratory, signal.SIGKILL)

    eventually(lambda: left(lab) == [], "nothing is left")
    lab.do("up", "--detach", *SMALL)
    assert "on" in lab.do("status")


def test_a_port_of_a_host_is_one_of_this_host(lab: Lab) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        refused = lab.command("up", "--detach", *SMALL, "--forward", f"{port}=n1:7000")
        assert refused.returncode == 1
        assert f"Port {port} of this host, for n1, cannot be used" in refused.stderr
    assert left(lab) == []

    lab.do("up", "--detach", *SMALL, "--forward", f"{port}=n1:7000")
    answer = "import socket; s = socket.create_server(('', 7000)); s.accept()[0].sendall(b'from n1')"
    lab.do("exec", "n1", "--", "sh", "-c", f'setsid -f python3 -c "{answer}" > /dev/null 2>&1')

    def said() -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                return connection.recv(99)
        except ConnectionResetError:  # a port without a listener on n1 is refused here
            return b""

    eventually(lambda: said() == b"from n1", "n1 answers on a port of this host")


def copied_checkout(to: Path) -> Path:
    """The laboratory with what it imports, for everybody to read: the checkout may lie where only root looks."""
    for name in ("lab", "controlplane/embedded", "engine_agent/protocol"):
        shutil.copytree(CHECKOUT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    wanted, known = {"typer", "httpx", "libfaketime"}, set[str]()
    while wanted:
        known.add(name := wanted.pop())
        with suppress(PackageNotFoundError):  # of another Python or system
            package = distribution(name)
            required = (REQUIRED_NAME.match(each) for each in package.requires or () if "extra ==" not in each)
            wanted |= {found[0] for found in required if found} - known
            for file in package.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (to / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file.locate(), to / file)
    for path in (to, *to.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


@pytest.mark.long
def test_it_needs_no_rights(lab: Lab) -> None:
    """As an account without rights: who is root becomes one, with files that are not root's alone."""
    home, user, as_user = lab.places.home.parent, os.geteuid(), [sys.executable]
    checkout, environment = CHECKOUT, {"SWITCHYARD_HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    if user == 0:
        user, as_user = NOBODY, ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", SYSTEM_PYTHON]
        checkout = copied_checkout(home.with_name("checkout"))
        environment["PYTHONPATH"] = str(checkout)
        for folder in (home, *home.parents[:-1]):
            folder.chmod(folder.stat().st_mode | 0o055) if folder.stat().st_uid == 0 else None
        shutil.chown(home, NOBODY, NOBODY)

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [*as_user, "-m", "lab.hosts.cli", *arguments],
            cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    command("up", "--detach", *SMALL)
    assert command("exec", "n1", "--", "id", "-u") == f"{user}\n"
    assert "CapEff:\t0000000000000000" in command("exec", "n1", "--", "cat", "/proc/self/status")
    command("exec", "n1", "--", "sh", "-c", "echo own > ~/own; echo own > /etc/local.d/own")
    command("skew", "n1", "+1h")
    command("power-off", "n1")
    command("boot", "n1")
    assert command("exec", "n1", "--", "sh", "-c", "cat ~/own /etc/local.d/own") == "own\nown\n"
    assert command("down", "--wipe") == "The laboratory has ended.\n"
    assert left(lab) == []


def test_who_has_no_laboratory_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NoLaboratory, match="`make lab` or `lab up` starts one"):
        client.ask(places_in(tmp_path)[0], "status")
