"""Node agents as processes under a control plane in the test, for tests of complete cells."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from engine_agent.node import procfs
from engine_agent.protocol.identity import PLAIN_LINKS_VARIABLE
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Assignment, Desired, EnginePlan, Fault, Observed, Peer, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from engine_agent.protocol.states import MemberRole, Phase
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.ports import free_ports

MODEL = "sim-70b"
"""Below the ports of outgoing connections, which would sometimes use one of a node's."""
START_S = 30.0
"""How long a busy machine may take to start several Pythons."""


class Node:
    """One node: its agent's process, and its messages."""

    def __init__(
        self, plane: FakeControlPlane, folder: Path, port_base: int, owns: NodeResources | None = None
    ) -> None:
        self.id = f"n-{port_base:08x}"
        self.owns = owns
        self.port_base = port_base
        self.home = folder / self.id
        self._plane = plane
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def agent(self) -> "subprocess.Popen[bytes]":
        assert self._agent is not None
        return self._agent

    def start_agent(self, program: tuple[str, ...] = ("-m", "engine_agent", "node")) -> None:
        argv = [sys.executable, *program, "--node-id", self.id, "--home", str(self.home)]
        argv += ["--server", self._plane.url, "--instance-type", "cpu", "--region", "r", "--host", "127.0.0.1"]
        argv += ["--port-base", str(self.port_base), "--topology", "a,b"]
        argv += ["--owns", msgspec.json.encode(self.owns).decode()] if self.owns else []
        env = {**os.environ, "SWITCHYARD_JOIN_TOKEN": "join-1", "SWITCHYARD_NODE_ID": self.id}
        env[PLAIN_LINKS_VARIABLE] = "1"  # the tests ask the cell proxy as an ingress would, and have no certificate
        self.home.mkdir(exist_ok=True)
        with (self.home / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def kill_agent(self) -> None:
        self.agent.kill()
        self.agent.wait()

    def terminate_agent(self) -> None:
        self.agent.terminate()
        assert self.agent.wait() == 0, self.log()

    def stop(self) -> int:
        """`stop-node`, as a user would call it."""
        asked = [sys.executable, "-m", "engine_agent", "stop-node", "--home", str(self.home)]
        with (self.home / "stop.log").open("ab") as log:
            status = subprocess.run(asked, stdout=log, stderr=log, check=False, timeout=60).returncode
        if self._agent is not None:
            self._agent.wait()
        return status

    def left(self) -> list[procfs.ProcessStat]:
        """Live processes that the node's agents started."""
        return procfs.started_by_agents_of(self.id)

    def kill_engine(self) -> None:
        pid = self.observed.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    @property
    def reports(self) -> list[Report]:
        return [message for message in self._plane.by_agent.get(self.id, []) if isinstance(message, Report)]

    @property
    def faults(self) -> list[Fault]:
        return [message for message in self._plane.by_agent.get(self.id, []) if isinstance(message, Fault)]

    @property
    def observed(self) -> Observed:
        return self.reports[-1].observed

    async def says(self, state: str, generation: int, within_s: float = START_S) -> Observed:
        """The first report from now on that says so."""

        def so() -> bool:
            return bool(self.reports) and (self.observed.state.value, self.observed.generation) == (state, generation)

        try:
            await eventually(so, within_s, f"{self.id} {state} in generation {generation}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.reports[-1:]}\n{self.log()}") from error
        return self.observed

    def log(self) -> str:
        logs = (self.home / f"{name}.log" for name in ("agent", "engine", "proxy"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists())


class Cell:
    """A leader and a follower under the orders of a test."""

    def __init__(self, plane: FakeControlPlane, leader: Node, follower: Node) -> None:
        self.plane = plane
        self.leader = leader
        self.follower = follower
        self.nodes = (leader, follower)
        self.version = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.leader.port_base + PROXY}"

    async def order(self, generation: int, phase: Phase = Phase.SERVE) -> None:
        self.version += 1
        for rank, node in enumerate(self.nodes):
            await self.plane.order(Desired(node.id, self.version, self._assignment(rank, generation, phase)))

    async def release(self) -> None:
        """Orders both nodes out of their cell."""
        self.version += 1
        for node in self.nodes:
            await self.plane.order(Desired(node.id, self.version, None))

    async def say(self, state: str, generation: int) -> None:
        for node in self.nodes:
            await node.says(state, generation)

    def _assignment(self, rank: int, generation: int, phase: Phase) -> Assignment:
        return Assignment(
            cell="r.sim.1",
            generation=generation,
            rank=rank,
            role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
            phase=phase,
            plan=EnginePlan(
                engine="sim",
                served_model=MODEL,
                max_concurrency=8,
                ready_timeout_s=60.0,
                args=("--load-time-s", "0.1", "--decode-step-ms", "20"),
            ),
            peers=tuple(Peer(node.id, place, "127.0.0.1", node.port_base) for place, node in enumerate(self.nodes)),
            secret=f"secret {generation}",
        )


@contextlib.asynccontextmanager
async def running_cell(plane: FakeControlPlane, folder: Path) -> AsyncIterator[Cell]:
    """Two nodes with agents and without orders; their processes are killed at the end."""
    first = free_ports(2 * PORTS_PER_NODE)
    share = NodeResources("cpu", (1,), cpus=(max(os.sched_getaffinity(0)),), memory_bytes=2**30)
    nodes = [Node(plane, folder, first), Node(plane, folder, first + PORTS_PER_NODE, share)]
    try:
        for node in nodes:
            node.start_agent()
        yield Cell(plane, *nodes)
    finally:
        statuses = await asyncio.gather(*(asyncio.to_thread(node.stop) for node in nodes))
        assert statuses == [0, 0], "\n".join(node.log() for node in nodes)
        assert [node.left() for node in nodes] == [[], []]
