"""Thousands of node agents in one process: TLS, hello, reports, heartbeats, pings and reconnects as the agents' own
code makes them, over plain sockets (`bench.fleet.agent_line`). Reports are made up; agents report every order as done.

`python -m bench.fleet.simulated_agents` reads an `AgentGroup` as JSON from its input and writes a `GroupStatus` to its
output every second."""

import gc
import logging
import os
import random
import resource
import ssl
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import structs

from bench.fleet.agent_line import Line, LineEnd, Network, frame_of, loopback_address, upgrade_request
from engine_agent.node.connection import backoff_s, report_interval_s, retry_after_s
from engine_agent.node.identity import Identity
from engine_agent.node.planning.heartbeats import REPORT_AT_LEAST_EVERY_S
from engine_agent.protocol.identity import IdentityFiles, control_name
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import (
    PROTOCOL_VERSION,
    Desired,
    DownMessage,
    Health,
    Heartbeat,
    Hello,
    Inventory,
    Observed,
    Refused,
    Report,
)
from engine_agent.protocol.states import AgentKind, EngineState, Phase
from engine_agent.protocol.telemetry_messages import NodeTelemetry

STATUS_EVERY_S = 1.0
NICENESS = 10
"""Real agents run on other machines, so these take no CPU time from the control plane."""


class Member(msgspec.Struct, frozen=True):
    """One agent: its node, its credential and certificate (PEM), and the cell that it is a member of. A spare has no
    `rank`."""

    node: str
    credential: str
    certificate: str
    address: str
    cell: str | None = None
    generation: int = 0
    rank: int | None = None


class AgentGroup(msgspec.Struct, frozen=True):
    """Agents of one process, which connect to `server` over `ramp_s` seconds. They have one key (PEM), because a
    certificate is for a name and any key. Leaders report `load`, and of a share `busy` of them it changes each time.

    `home`: an empty folder. `bundle`, `revoked`: the fleet's authorities and revocation lists. `first_address`: number
    of the first agent's address."""

    server: str
    home: str
    key: str
    bundle: str
    revoked: str
    members: tuple[Member, ...]
    load: Load
    ramp_s: float
    busy: float = 0.0
    first_address: int = 1


class GroupStatus(msgspec.Struct, frozen=True):
    """The connections of a process's agents at Unix time `at`. `tries` counts attempts to connect since `began`;
    `reasons` counts why agents are not connected."""

    began: float
    at: float
    agents: int
    connected: int
    tries: int
    reasons: dict[str, int]


@lru_cache(maxsize=1000)
def _heartbeat(seq: int) -> bytes:
    return frame_of(Heartbeat(seq))


class SimulatedAgent:
    """One agent, with a healthy engine if it is a member of a cell. `agent_rss_bytes` of a report is the microsecond at
    which it was made, so the stored report shows its age from end to end."""

    __slots__ = (
        *("_attempts", "_failures", "_is_busy", "_load", "_member", "_observed", "_sent_at_s", "_seq"),
        *("address", "context", "line", "network", "reason"),
    )

    def __init__(
        self,
        network: Network,
        member: Member,
        context: ssl.SSLContext,
        address: str,
        load: Load,
        *,
        is_busy: bool = False,
    ) -> None:
        self.network, self._member, self._load, self._is_busy = network, member, load, is_busy
        self.context, self.address = context, address
        self.line: Line | None = None
        self.reason = "not connected yet"
        self._observed = Observed(state=EngineState.IDLE)
        if member.cell is not None:
            self._observed = _ready(member.cell, member.generation, member.rank)
        self._attempts = self._failures = self._seq = 0
        self._sent_at_s = 0.0

    @property
    def attempts(self) -> int:
        return self._attempts

    def connect(self) -> None:
        self._attempts += 1
        self.line = Line(self.network, self)

    def request(self) -> bytes:
        return upgrade_request(self.network.server, self._member.credential)

    def opened(self, line: Line) -> None:
        self._seq, self._sent_at_s = 0, 0.0
        line.send(self._hello())

    def beat(self, line: Line) -> float:
        """A heartbeat if the last report still holds. Only the load of busy leaders changes between two reports, so
        nothing else has to be compared (`still_holds`)."""
        if self._is_busy or not self._seq or time.monotonic() - self._sent_at_s >= REPORT_AT_LEAST_EVERY_S:
            self._report(line)
        else:
            line.send_frame(_heartbeat(self._seq))
        return report_interval_s(random.random())

    def received(self, line: Line, message: DownMessage) -> None:
        if isinstance(message, Refused):
            raise LineEnd(f"refused by the control plane: {message.reason}", person_must_act=not message.retry)
        if isinstance(message, Desired):
            place = message.assignment
            idle = Observed(state=EngineState.IDLE)
            now = _ready(place.cell, place.generation, place.rank) if place and place.phase is Phase.SERVE else idle
            if now != self._observed:
                self._observed = now
                self._report(line)

    def ended(self, line: Line, end: LineEnd) -> None:
        """Connects again after the pause that an agent makes."""
        settings = self.network.settings
        was_stable = line.is_open and time.monotonic() - line.opened_at_s >= settings.stable_after_s
        self._failures = 0 if was_stable else self._failures + 1
        self.line, self.reason = None, str(end)
        wait_s = settings.refused_backoff_s if end.person_must_act else 0.0
        again_s = retry_after_s(end.retry_after, random.random())
        wait_s = max(wait_s, again_s, backoff_s(settings, self._failures, random.random()))
        self.network.wheel.add(wait_s, self.connect)

    def report(self) -> Report:
        telemetry = NodeTelemetry(
            host_cpu_percent=12.5, host_memory_used_bytes=2**31, agent_rss_bytes=time.time_ns() // 1000
        )
        report = Report(seq=self._seq, observed=self._observed, telemetry=telemetry)
        if self._observed.state is EngineState.READY:
            report = structs.replace(report, health=Health(ok=True, probe_ms=3.2, checked_s_ago=1.5))
            if self._observed.rank == 0:
                report = structs.replace(report, load=self._load)
        return report

    def _report(self, line: Line) -> None:
        if self._is_busy:
            self._load = structs.replace(self._load, requests_total=self._load.requests_total + 1)
        self._seq, self._sent_at_s = self._seq + 1, time.monotonic()
        line.send(self.report())

    def _hello(self) -> Hello:
        inventory = Inventory("local-cpu", self._member.address, 20_000, cores=8, memory_bytes=2**35)
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.NODE,
            id=self._member.node,
            boot_id="boot",
            agent_version="1",
            inventory=inventory,
            fingerprint={"sim.engine": "sim 1", "host.kernel": "6.8", "python": "3.11"},
        )


def _ready(cell: str, generation: int, rank: int | None) -> Observed:
    return Observed(state=EngineState.READY, cell=cell, generation=generation, rank=rank, engine_pid=4711)


def agents_of(group: AgentGroup) -> list[SimulatedAgent]:
    """All agents of a group, each connecting at a random moment of the ramp."""
    home = Path(group.home)
    identity = Identity(home)
    identity.folder.mkdir(parents=True, exist_ok=True)
    identity.store_trust(bundle=group.bundle, revoked=group.revoked)
    contexts = []
    for member in group.members:
        identity.combined_file.write_text(member.certificate + group.key)
        contexts.append(IdentityFiles(home).client_context())
    network, draw = Network(group.server, control_name(identity.fleet()).dns), random.Random(0)
    agents = []
    for number, (member, context) in enumerate(zip(group.members, contexts, strict=True)):
        address = loopback_address(group.first_address + number)
        agent = SimulatedAgent(network, member, context, address, group.load, is_busy=draw.random() < group.busy)
        network.wheel.add(draw.uniform(0, group.ramp_s), agent.connect)
        agents.append(agent)
    return agents


def status_of(agents: list[SimulatedAgent], began: float = 0.0) -> GroupStatus:
    away = [agent for agent in agents if agent.line is None or not agent.line.is_open]
    reasons = Counter(agent.reason[:60] for agent in away)
    tries = sum(agent.attempts for agent in agents)
    return GroupStatus(began, time.time(), len(agents), len(agents) - len(away), tries, reasons)


def main() -> None:
    agents = agents_of(msgspec.json.decode(sys.stdin.buffer.read(), type=AgentGroup))
    os.nice(NICENESS)
    began = time.time()
    while True:
        agents[0].network.run(STATUS_EVERY_S)
        sys.stdout.buffer.write(msgspec.json.encode(status_of(agents, began)) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    logging.disable()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()  # collections over thousands of agents cost CPU time that separate agents would not need
    with suppress(KeyboardInterrupt):
        main()
