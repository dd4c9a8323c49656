"""Every listening socket of a running fleet is in the table of docs/security.md and protected as stated there; its
files are not readable by other users.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.process_ownership import processes_of
from engine_agent.ingress.main import MAX_THREADS
from engine_agent.protocol import ports
from tests.docs.pages import text_of
from tests.scenarios.running_fleet import RunningFleet

pytestmark = [pytest.mark.scenario, pytest.mark.vllm, pytest.mark.timeout(900)]

LISTENS = "00010000"
"""Flag of a listening socket in /proc/net/unix."""
OF_NODES = {
    ports.PROXY: "cell proxy", ports.PROXY_ADMIN: "cell proxy administration",
    ports.ENGINE: "engine", ports.ENGINE_ADMIN: "engine administration", ports.AGENT_METRICS: "node agent metrics",
    ports.ARTIFACTS: "artifacts for nodes",
    **dict.fromkeys(range(ports.RENDEZVOUS, ports.RENDEZVOUS + ports.RENDEZVOUS_SLOTS), "rendezvous"),
}  # fmt: skip
FILES = {
    ".s.PGSQL.5432": "PostgreSQL", "valkey.sock": "Valkey", "admin.sock": "HAProxy administration",
    "master.sock": "HAProxy administration",
    **dict.fromkeys(
        ("parser.sock", "no-cell.sock", "sticky.sock", "door.sock", "attempts.sock", "parsed.sock"), "HAProxy internal"
    ),
    **dict.fromkeys((f"parsed-{thread}.sock" for thread in range(1, MAX_THREADS + 1)), "HAProxy internal"),
    "held.sock": "bell of held requests", "cache-index.sock": "index of caches",
}  # fmt: skip


@dataclass(frozen=True)
class Listening:
    """One socket: its name in the table, and its address, or who may open its file."""

    name: str
    where: str


def documented() -> dict[str, str]:
    """Name -> address, from the table."""
    table = text_of("docs/security.md").partition("### Listening sockets")[2].partition("\n## ")[0]
    rows = (line.split("|") for line in table.splitlines() if line.startswith("| ") and "---" not in line)
    return {cells[1].strip(): cells[2].strip() for cells in rows if cells[1].strip() != "socket"}


def listening(fleet: RunningFleet) -> set[Listening]:
    files = {
        line.split()[6]: line.split()[7]
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]
        if line.split()[3] == LISTENS and len(line.split()) > 7
    }
    found: set[Listening] = set()
    for process in processes_of(fleet.home):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it has just exited
            found.update(list(listening_of(fleet, process, files)))
    return found


def listening_of(fleet: RunningFleet, process: psutil.Process, files: Mapping[str, str]) -> Iterator[Listening]:
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            yield Listening(name_of(fleet, connection.laddr.port, process), connection.laddr.ip)
    for inode in sockets_of(process):
        if inode in files:
            yield Listening(*of_file(process, files[inode]))


def name_of(fleet: RunningFleet, port: int, process: psutil.Process) -> str:
    if port == fleet.port:
        return "web"
    if port == fleet.agent_port:
        return "web for agents"
    of_ingress = {0: "ingress", 1000: "ingress agent metrics", ports.HOPS_ABOVE: "ingress for other regions"}
    for first, name in ((fleet.ingress_port + above, name) for above, name in of_ingress.items()):
        if first <= port < first + 2:
            return name
    if fleet.node_ports <= port < fleet.node_ports + 1000:
        return OF_NODES.get((port - fleet.node_ports) % ports.PORTS_PER_NODE, f"offset of {port}")
    command = " ".join(process.cmdline())
    is_vllm = "engine_agent.engines.vllm" in command or command.startswith("vllm ")
    return "vLLM between ranks" if is_vllm else f"port {port} of {command}"


def of_file(process: psutil.Process, path: str) -> tuple[str, str]:
    """Name, and who may open it. HAProxy and relays first listen under a temporary name, in the same folder."""
    file = Path(process.cwd()) / re.sub(r"(?<=\.sock)\.\d+(\.tmp)?$", "", path)
    is_private = any(not stat.S_IMODE(each.stat().st_mode) & 0o077 for each in (file, file.parent) if each.exists())
    is_vllm = file.parent.name.startswith("switchyard-engine-")
    if re.fullmatch(r"\d+\.sock", file.name):
        return "relay", "its owner" if is_private else "anybody"
    return "vLLM internal" if is_vllm else FILES.get(file.name, str(file)), "its owner" if is_private else "anybody"


def sockets_of(process: psutil.Process) -> Iterator[str]:
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # removed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def test_every_listening_socket_is_documented_and_protected_as_it_says(fleet: RunningFleet) -> None:
    table, found = documented(), listening(fleet)
    assert {each.name for each in found} == set(table)
    reachable = {"loopback": {"127.0.0.1", "::1"}, "a file": {"its owner"}}
    for each in found:
        assert each.where in reachable.get(table[each.name].partition(",")[0], {each.where}), each


def test_no_file_of_a_fleet_is_for_others(fleet: RunningFleet) -> None:
    """Only the agents' code is readable by others, because engines' accounts run it; no file is writable by others."""
    files = [path for path in fleet.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    readable = []
    for path in files:
        denied = 0o022 if path.is_relative_to(fleet.home / "releases") else 0o077
        try:
            readable += [str(path)] if stat.S_IMODE(path.stat().st_mode) & denied else []
        except FileNotFoundError:  # rewritten meanwhile
            continue
    assert readable == []
