"""The agent as a process: enrols, applies tables and acknowledges them, survives kill -9, and stops cleanly."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from engine_agent.ingress import haproxy
from engine_agent.ingress.config import CONFIG_FILE
from engine_agent.ingress.haproxy import PortTaken, find_master, port_reserved
from engine_agent.ingress.main import MAX_THREADS, default_threads
from engine_agent.ingress.settings import BODY_PARSERS
from engine_agent.node import procfs
from engine_agent.node.accounts import Service, service_account
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import Affinity, IngressObserved, IngressReport, RoutingTable
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOME, pool
from tests.engine_agent.ingress.traffic import SteadyTraffic
from tests.engine_agent.process_status import children_of, status_of
from tests.engine_agent.tls import fleet_of_rigs
from tests.ports import free_ingress_port, free_port

pytestmark = pytest.mark.processes


class AgentProcess:
    """One `python -m engine_agent ingress` after another in the same home."""

    def __init__(self, plane: FakeControlPlane, home: Path) -> None:
        self.plane = plane
        self.home = home
        self.port = free_ingress_port()
        home.mkdir()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def haproxies(self) -> list[int]:
        """The masters that run in this home."""
        folders = (self.home, *(self.home / tier.name for tier in BODY_PARSERS))
        found = (find_master(folder / CONFIG_FILE) for folder in folders)
        return [pid for pid in found if pid is not None]

    async def start(self) -> None:
        arguments = ["--ingress-id", "i-us-east-1", "--region", HOME, "--home", str(self.home)]
        arguments += ["--server", self.plane.url, "--port", str(self.port), "--threads", "1"]
        with (self.home.parent / "agent.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine_agent", "ingress", *arguments,
                env={**os.environ, "SWITCHYARD_JOIN_TOKEN": "join-1"},
                stdout=log, stderr=log,
            )  # fmt: skip

    async def enrolled(self) -> None:
        """Waits for its connection and its key, which it keeps in memory. Then gives it a certificate, which the
        control plane of tests does not issue."""
        await eventually(lambda: self.plane.connections == 1 and Identity(self.home).key_file.exists(), 60)
        fleet_of_rigs().certify(self.home, IdentityKind.INGRESS, "i-us-east-1")

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 60)

    @property
    def observed(self) -> IngressObserved | None:
        reports = self.plane.of(IngressReport)
        return reports[-1].observed if reports else None

    async def reports(self, revision: int, *cells: FakeCell) -> IngressObserved:
        """Waits for a new report with this revision in force, these cells up and HAProxy running."""
        seen = len(self.plane.reports)

        def look() -> bool:
            if len(self.plane.reports) == seen or (observed := self.observed) is None:
                return False
            up = all(observed.cells.get(cell.name) == "up" for cell in cells)
            return up and observed.revision == revision and observed.haproxy_pid is not None

        await eventually(look, 60, f"revision {revision} with {[cell.name for cell in cells]}, not {self.observed}")
        assert self.observed is not None
        return self.observed


@contextlib.asynccontextmanager
async def agent_of(plane: FakeControlPlane, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(plane, tmp_path / "home")
    await agent.start()
    try:
        yield agent
    finally:
        if agent.process.returncode is None:
            agent.process.kill()
            await agent.process.wait()
        for pid in agent.haproxies:
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def plane() -> FakeControlPlane:
    return FakeControlPlane()


@pytest.mark.asyncio
async def test_it_enrols_obeys_and_acknowledges_and_a_change_is_reported_at_once(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    async with plane.running(), FakeCell().running() as cell, agent_of(plane, tmp_path) as agent:
        await agent.enrolled()
        await plane.push(RoutingTable(7, HOME, (pool(cell),)))
        await agent.reports(7, cell)
        hello = plane.of(Hello)[0]
        assert (hello.kind, hello.id, hello.boot_id) == (AgentKind.INGRESS, "i-us-east-1", procfs.boot_id())
        await cell.die()
        await eventually(lambda: agent.observed and agent.observed.cells[cell.name] == "down")
        assert plane.of(IngressReport)[-1].cells[cell.name].reason
        assert await agent.end(signal.SIGTERM) == 0
        assert agent.haproxies == [], "SIGTERM stops HAProxy too"


@pytest.mark.asyncio
async def test_workers_of_haproxy_are_not_root_even_if_the_agent_is(plane: FakeControlPlane, tmp_path: Path) -> None:
    account = service_account(Service.INGRESS)
    uid = account.uid if account else os.geteuid()
    long = {"model": "demo", "messages": [{"role": "user", "content": "x" * 100_000}]}
    async with plane.running(), FakeCell().running() as cell, agent_of(plane, tmp_path) as agent:
        await agent.enrolled()
        affine = structs.replace(pool(cell), affinity=Affinity())
        await plane.push(RoutingTable(7, HOME, (affine,)))
        await agent.reports(7, cell)
        for workers in map(children_of, agent.haproxies):
            assert [status_of(pid)["Uid"] for pid in workers] == [str(uid)]
            assert [status_of(pid)["NoNewPrivs"] for pid in workers] == ["1" if account else "0"]
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{agent.url}/v1/chat/completions", json=long)
        assert answer.status_code == 200, "the parsers' sockets are the account's"
        assert [file.name for file in agent.home.iterdir() if file.is_file() and file.stat().st_mode & 0o077] == []


@pytest.mark.asyncio
async def test_killed_agent_and_killed_haproxy_cost_nothing_that_can_be_kept(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    async with plane.running(), FakeCell().running() as cell, agent_of(plane, tmp_path) as agent:
        await agent.enrolled()
        await plane.push(RoutingTable(7, HOME, (pool(cell),)))
        before = await agent.reports(7, cell)
        kept = agent.haproxies
        async with SteadyTraffic(agent.url, per_s=50).flowing() as traffic:
            await agent.end(signal.SIGKILL)
            await traffic.until_sent(10)
            await agent.start()
            adopted = await agent.reports(7, cell)
        assert traffic.failures == []
        assert adopted.haproxy_pid == before.haproxy_pid
        assert len(kept) == 3, "one that serves and two that read long bodies"
        assert agent.haproxies == kept
        assert before.haproxy_pid is not None
        os.kill(before.haproxy_pid, signal.SIGKILL)
        while (await agent.reports(7, cell)).haproxy_pid == before.haproxy_pid:
            pass  # a report that was already sent
        assert agent.haproxies[1:] == kept[1:], "the others go on"


@pytest.mark.asyncio
async def test_without_a_control_plane_it_serves_from_its_journal(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with FakeCell().running() as cell, agent_of(plane, tmp_path) as agent:
        async with plane.running():
            await agent.enrolled()
            await plane.push(RoutingTable(7, HOME, (pool(cell),)))
            await agent.reports(7, cell)
        await agent.end(signal.SIGTERM)
        await agent.start()
        async with httpx.AsyncClient(base_url=agent.url, trust_env=False) as client:
            answers: list[int] = []

            async def serves() -> None:
                while answers[-1:] != [200]:
                    with contextlib.suppress(httpx.HTTPError):
                        answers.append((await client.post("/v1/completions", json={"model": "demo"})).status_code)
                    await asyncio.sleep(0.02)

            await asyncio.wait_for(serves(), 60)
        async with plane.running():
            assert (await agent.reports(7, cell)).reason == ""
        assert len(plane.enrolled) == 1


@pytest.mark.asyncio
async def test_a_second_agent_for_the_same_home_and_a_bad_server_are_refused_in_words(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    async with plane.running(), agent_of(plane, tmp_path) as agent:
        await agent.enrolled()
        first = agent.process
        await agent.start()
        assert await asyncio.wait_for(agent.process.wait(), 60) == 1
        assert "another agent runs with the home" in (tmp_path / "agent.log").read_text()
        agent.plane = FakeControlPlane(1)
        agent.plane.url = "localhost:1"
        await agent.start()
        assert await asyncio.wait_for(agent.process.wait(), 60) == 1
        assert "server must be http://HOST:PORT" in (tmp_path / "agent.log").read_text()
        first.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.wait(), 60) == 0


PINNED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from engine_agent.ingress.main import default_threads
print(default_threads())
"""


def test_haproxy_has_a_thread_for_each_processor_that_the_agent_may_run_on_up_to_a_limit() -> None:
    assert default_threads() == min(MAX_THREADS, len(os.sched_getaffinity(0)))
    pinned = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert pinned.stdout == "1\n"


def test_a_port_that_a_haproxy_of_another_fleet_shares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "RELEASED_WITHIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(PortTaken, match="another process listens on it"),
            port_reserved("127.0.0.1", port, lambda: False),
        ):
            pass
        with port_reserved("127.0.0.1", port, lambda: True):  # its own, left by a killed agent
            pass


def test_of_two_ingresses_that_start_at_once_one_refuses(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "engine_agent", "ingress", "--ingress-id", "i-east", "--region", "east"]
    command += ["--home", str(tmp_path), "--server", "http://127.0.0.1:9", "--port", str(port)]
    with port_reserved("127.0.0.1", port, lambda: False):
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"i-east: 127.0.0.1:{port} is in use: another ingress of this host reserved it" in second.stderr
