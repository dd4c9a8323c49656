"""Thousands of node agents in one process, each with the agent's own connection code: protocol, hello, a report every
two seconds, reconnects. Reports are made up; agents report every order as done.

`python -m bench.fleet.simulated_agents` reads an `AgentGroup` as JSON from its input and writes a `GroupStatus` to its
output every second."""

import asyncio
import gc
import logging
import os
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import structs

from engine_agent.node.connection import AgentConnection, report_interval_s
from engine_agent.node.enrolment import Enrolment
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import PROTOCOL_VERSION, Desired, Health, Hello, Inventory, Observed, Order, Report
from engine_agent.protocol.states import AgentKind, EngineState, Phase
from engine_agent.protocol.telemetry_messages import NodeTelemetry

STATUS_EVERY_S = 1.0
NICENESS = 10
"""Real agents run on other machines, so these take no CPU time from the control plane."""


class Member(msgspec.Struct, frozen=True):
    """One agent: its node, its credential, and the cell that it is a member of. A spare has no `rank`."""

    node: str
    credential: str
    address: str
    cell: str | None = None
    generation: int = 0
    rank: int | None = None


class AgentGroup(msgspec.Struct, frozen=True):
    """Agents of one process, each with its home in `homes`. They connect over `ramp_s` seconds. Leaders report `load`,
    and of a share `busy` of them it changes each time; `bundle` has the fleet's authorities."""

    servers: tuple[str, ...]
    homes: str
    bundle: str
    members: tuple[Member, ...]
    load: Load
    ramp_s: float
    busy: float = 0.0


class GroupStatus(msgspec.Struct, frozen=True):
    """The connections of a process's agents at Unix time `at`. `tries` counts attempts to connect since its start;
    `reasons` counts why agents are not connected."""

    at: float
    agents: int
    connected: int
    tries: int
    reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class KnownAgent(Enrolment):
    """An agent that has enrolled; its credential is in memory, not in a file."""

    credential: str = ""
    tries: Counter[str] = field(default_factory=Counter)

    def stored_credential(self) -> str | None:
        self.tries[self.agent_id] += 1
        return self.credential


@dataclass
class SimulatedAgent:
    """One agent, with a healthy engine if it is a member of a cell. `agent_rss_bytes` of a report is the microsecond at
    which it was made, so the stored report shows its age from end to end."""

    member: Member
    load: Load
    server: str
    home: Path
    tries: Counter[str]
    is_busy: bool = False
    observed: Observed = field(default_factory=lambda: Observed(state=EngineState.IDLE))

    def __post_init__(self) -> None:
        place = self.member
        if place.cell is not None:
            self.observed = _ready(place.cell, place.generation, place.rank)
        enrolment = KnownAgent(
            self.server, AgentKind.NODE, place.node, self.home, credential=place.credential, tries=self.tries
        )
        self.connection = AgentConnection(enrolment=enrolment, hello=self._hello, on_message=self._receive)

    async def run(self, begins_after_s: float) -> None:
        await asyncio.sleep(begins_after_s)
        connected = asyncio.create_task(self.connection.run())
        while not connected.done():
            self._report()
            await asyncio.sleep(report_interval_s(random.random()))

    def _hello(self) -> Hello:
        inventory = Inventory("local-cpu", self.member.address, 20_000, cores=8, memory_bytes=2**35)
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.NODE,
            id=self.member.node,
            boot_id="boot",
            agent_version="1",
            inventory=inventory,
            fingerprint={"sim.engine": "sim 1", "host.kernel": "6.8", "python": "3.11"},
        )

    def _receive(self, message: Order) -> None:
        if isinstance(message, Desired):
            place = message.assignment
            idle = Observed(state=EngineState.IDLE)
            now = _ready(place.cell, place.generation, place.rank) if place and place.phase is Phase.SERVE else idle
            if now != self.observed:
                self.observed = now
                self._report()

    def _report(self) -> None:
        telemetry = NodeTelemetry(
            host_cpu_percent=12.5, host_memory_used_bytes=2**31, agent_rss_bytes=time.time_ns() // 1000
        )
        report = Report(seq=0, observed=self.observed, telemetry=telemetry)
        if self.observed.state is EngineState.READY:
            report = structs.replace(report, health=Health(ok=True, probe_ms=3.2, checked_s_ago=1.5))
            if self.observed.rank == 0:
                if self.is_busy:
                    self.load = structs.replace(self.load, requests_total=self.load.requests_total + 1)
                report = structs.replace(report, load=self.load)
        self.connection.send(report)


def _ready(cell: str, generation: int, rank: int | None) -> Observed:
    return Observed(state=EngineState.READY, cell=cell, generation=generation, rank=rank, engine_pid=4711)


def _status(agents: list[SimulatedAgent], tries: Counter[str]) -> GroupStatus:
    reasons: Counter[str] = Counter()
    for agent in agents:
        status = agent.connection.status
        if not status.connected:
            reasons[status.reason.rpartition("agents/ws ")[2][:60]] += 1
    return GroupStatus(time.time(), len(agents), len(agents) - reasons.total(), tries.total(), reasons)


async def main() -> None:
    group = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentGroup)
    draw = random.Random(0)
    tries: Counter[str] = Counter()
    agents = [
        SimulatedAgent(
            *(member, group.load, group.servers[number % len(group.servers)], Path(group.homes) / member.node, tries),
            is_busy=draw.random() < group.busy,
        )
        for number, member in enumerate(group.members)
    ]
    for agent in agents:
        agent.connection.identity.store_trust(bundle=group.bundle, revoked="")
    running = [asyncio.create_task(agent.run(draw.uniform(0, group.ramp_s))) for agent in agents]
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        sys.stdout.buffer.write(msgspec.json.encode(_status(agents, tries)) + b"\n")
        sys.stdout.flush()
        for ended in (task for task in running if task.done()):
            ended.result()


if __name__ == "__main__":
    logging.disable()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(NICENESS)
    gc.disable()  # collections over thousands of agents cost CPU time that separate agents would not need
    try:
        import uvloop

        uvloop.run(main())
    except KeyboardInterrupt:
        pass
