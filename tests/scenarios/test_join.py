"""A host joins with the printed command: in a network namespace without access to a package index, if this user may
create one, else on the fleet's host. It returns after a reboot, and leaves nothing behind.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.scenarios.running_fleet import LIMIT_S, WORKER, RunningFleet, eventually

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(900)]

REGION = "eu-west-1"
PORT = 27000 + 40 * WORKER
LINE_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Host:
    """`inside`: prefix of commands that run on it. `control`: address of the fleet for it."""

    inside: tuple[str, ...]
    control: str
    prefix: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the shell of a user with a default environment."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.prefix.parent),
            "SWITCHYARD_PREFIX": str(self.prefix),
        }
        return subprocess.run(
            [*self.inside, "sh", "-c", command],
            env=environment, capture_output=True, text=True, timeout=LINE_LIMIT_S, check=False,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.prefix) in part for part in process.cmdline()):
                    found.append(process)
        return found


@contextlib.contextmanager
def own_network() -> Iterator[tuple[tuple[str, ...], str]]:
    """A network namespace with one link to this host; None if this user may not create one."""
    name, net = f"join{os.getpid()}", f"10.213.{WORKER}"
    outer, inner = f"jo{os.getpid()}"[:15], f"ji{os.getpid()}"[:15]
    commands = (
        f"netns add {name}", f"link add {outer} type veth peer name {inner} netns {name}",
        f"addr add {net}.1/24 dev {outer}", f"link set {outer} up", f"-n {name} addr add {net}.2/24 dev {inner}",
        f"-n {name} link set {inner} up", f"-n {name} link set lo up",
    )  # fmt: skip
    try:
        made = all(
            subprocess.run(["ip", *command.split()], capture_output=True, check=False).returncode == 0
            for command in commands
        )
    except OSError:
        made = False
    try:
        yield (("ip", "netns", "exec", name), f"{net}.1") if made else ((), "127.0.0.1")
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with own_network() as (inside, control):
        found = Host(inside, control, tmp_path_factory.mktemp("host") / "switchyard")
        yield found
        if (python := found.prefix / "current/venv/bin/python").exists():
            found.run(f"{python} -m engine_agent leave --now --code {found.prefix}")
        assert found.processes() == []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, host: Host) -> Iterator[RunningFleet]:
    running = RunningFleet(tmp_path_factory.mktemp("fleet") / "home")
    running.environment |= {
        "SWITCHYARD_DEMO_PROVIDER": "machines",  # it needs no nodes, which would cost a processor
        "SWITCHYARD_AGENT_LISTEN": "0.0.0.0",  # noqa: S104 - the host that joins has no other way
        "SWITCHYARD_AGENT_URL": f"https://{host.control}:{running.agent_port}",
        "SWITCHYARD_ALLOWED_HOSTS": f"127.0.0.1,localhost,{host.control}",
    }
    try:
        running.begin()
        running.post("regions", {"name": REGION, "provider": "machines"})
        for without_machines in ("us-east-1", "us-west-2"):  # missing cells there keep the last cell here from draining
            running.scale("sim-70b", without_machines, 0)
        yield running
    finally:
        running.down()


def line(fleet: RunningFleet, **options: Any) -> str:
    body = {"region": REGION, "count": 1, "instance_type": "local.cpu", **options}
    return f"{fleet.post('machines/invitations', body)['line']} --port {PORT}"


def spares(fleet: RunningFleet) -> list[dict[str, Any]]:
    nodes = fleet.api("nodes", region=REGION)["results"]
    return [node for node in nodes if node["state"] == "ready" and node["connected"]]


def refusals(fleet: RunningFleet) -> list[str]:
    return [event["message"] for event in fleet.api("events", kind="machine.refused")["results"]]


def engines(host: Host) -> list[str]:
    """Devices of each engine on the host, as its environment states them."""
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_first = environment.get("SWITCHYARD_PROCESS") == "engine" and process.pid == os.getsid(process.pid)
            found += [environment["SWITCHYARD_DEVICES"]] if is_first else []
    return sorted(found)


def serve_divided(fleet: RunningFleet, host: Host, machine: str, layout: str, devices: list[str]) -> None:
    """Divides the host, serves cells of two nodes on all of its nodes, and empties it again."""
    fleet.post(f"machines/{machine}/layout", {"layout": layout, "instance_type": "local.cpu"})
    eventually(lambda: len(spares(fleet)) == len(devices), LIMIT_S)
    assert fleet.api(f"machines/{machine}")["layout"] == layout
    cells = len(devices) // 2
    fleet.scale("sim-70b", REGION, cells)
    assert engines(host) == devices
    nodes = [node["node"] for node in fleet.api(f"machines/{machine}")["nodes"]]
    assert len(set(nodes)) == len(devices)
    fleet.scale("sim-70b", REGION, 0)
    eventually(lambda: len(spares(fleet)) == len(devices), LIMIT_S)


def refused(fleet: RunningFleet, host: Host, command: str, says: str) -> None:
    """The reason is printed on the host and in the timeline, and nothing is left behind."""
    done = host.run(command)
    assert says in done.stderr, done
    assert not host.prefix.exists()
    assert any(says in message for message in refusals(fleet)), refusals(fleet)


def test_a_wrong_token_joins_nothing(fleet: RunningFleet, host: Host) -> None:
    curl = line(fleet).partition(" -- ")[0]
    refused(fleet, host, f"{curl} -- sw_00000000000000_{'0' * 48}", "this token is unknown")


def test_a_port_that_is_taken_is_named(fleet: RunningFleet, host: Host) -> None:
    where = host.control.removesuffix(".1") + ".2" if host.inside else host.control
    taken = f"python3 -m http.server --bind {where} {PORT + 3} >/dev/null 2>&1"
    asks = f"not socket.socket().connect_ex(('{where}', {PORT + 3})) or time.sleep(0.1)"
    is_up = f'python3 -c "import socket, time; next(i for i in range(600) if {asks})"'
    command = f"{taken} & {is_up}; {line(fleet)}; code=$?; kill %1 $!; exit $code"
    refused(fleet, host, command, f"port {PORT + 3} of {PORT} to {PORT + 19} is in use")


def test_an_archive_that_differs_is_not_unpacked(fleet: RunningFleet, host: Host) -> None:
    changed = line(fleet).replace("| sh", "| sed -E 's/^(cp3[0-9]+-[a-z0-9_]+) ..../\\1 dead/' | sh")
    refused(fleet, host, changed, "nothing was installed, run the line again")


def test_a_host_joins_comes_back_after_a_reboot_and_leaves(fleet: RunningFleet, host: Host) -> None:
    began = time.monotonic()
    used = line(fleet)
    done = host.run(used)
    assert done.returncode == 0, done
    assert f"in {REGION}" in done.stdout
    [node] = eventually(lambda: spares(fleet), LIMIT_S)
    print(f"from the line to a spare: {time.monotonic() - began:.1f} s")  # noqa: T201 - a figure, not a check
    [machine] = fleet.api("machines", region=REGION)["results"]
    assert (machine["state"], machine["node"], machine["provider"]) == ("taken", node["id"], "machines")

    for process in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    eventually(lambda: not spares(fleet), LIMIT_S)
    host.run(f"setsid {host.prefix}/run >/dev/null 2>&1 &")
    eventually(lambda: [spare["id"] for spare in spares(fleet)] == [node["id"]], LIMIT_S)

    serve_divided(fleet, host, machine["id"], "8x1", [f"cpu {number}" for number in range(8)])
    serve_divided(fleet, host, machine["id"], "4x2", ["cpu 0,1", "cpu 2,3", "cpu 4,5", "cpu 6,7"])

    assert "uninstall it first" in host.run(used).stderr
    fleet.post(f"machines/{machine['id']}/remove", {"why": "sold"})
    eventually(lambda: not host.prefix.exists() and not host.processes(), LIMIT_S)
    assert fleet.api(f"machines/{machine['id']}")["state"] == "gone"
    refused(fleet, host, used, "this token was for one host and is used up")


def test_only_the_pinned_key_is_believed(fleet: RunningFleet, host: Host) -> None:
    wrong = line(fleet).replace("sha256//", "sha256//AAAA")
    done = host.run(wrong)
    assert "public key" in done.stderr
    assert not host.prefix.exists()


def test_the_port_for_people_joins_nobody(fleet: RunningFleet) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as connection:
        connection.sendall(b"GET /join HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b"404" in connection.recv(100)
