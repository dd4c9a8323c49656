"""What all parts of a simulated world share: its clock, its random numbers, its network and the timeline of the run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from engine_agent.protocol.messages import Health, Observed
from simulator.clock import EventQueue
from simulator.network import Network
from simulator.version_behaviour import VersionBehaviour

TYPICAL = VersionBehaviour()


@dataclass(frozen=True, slots=True)
class AgentReport:
    """A report on its way: the connection it belongs to, and what it states."""

    connection: int
    observed: Observed
    health: Health | None
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    at_s: float
    kind: str
    subject: str
    text: str


@dataclass
class Timeline:
    """What happened. `starts` counts engines started by (node, cell, generation) while the control plane could be
    reached."""

    entries: list[TimelineEntry] = field(default_factory=list)
    violations: list[TimelineEntry] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    starts: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def note(self, at_s: float, kind: str, subject: str, text: str) -> None:
        self.counts[kind] += 1
        self.entries.append(TimelineEntry(at_s, kind, subject, text))

    def violation(self, at_s: float, invariant: str, text: str) -> None:
        self.violations.append(TimelineEntry(at_s, "violation", invariant, text))


class Server(Protocol):
    """The control plane's end of the agents' connections."""

    def connected(self, node: str, connection_id: int) -> None: ...

    def disconnected(self, node: str, connection_id: int) -> None: ...

    def report_received(self, node: str, report: AgentReport) -> None: ...

    def is_known(self, node: str, report: AgentReport) -> bool:
        """Whether this was reported already, will not change by itself, and no desired state waits to be sent."""


@dataclass
class SimulationContext:
    """Shared by all machines of a run. `behaviours`: by version; `skip_repeats`: a report that repeats the last one
    costs no event."""

    queue: EventQueue
    random: Random
    network: Network
    server: Server
    timeline: Timeline = field(default_factory=Timeline)
    behaviours: Mapping[str, VersionBehaviour] = field(default_factory=dict)
    skip_repeats: bool = False
    serial: int = 1000

    def behaviour(self, version: str) -> VersionBehaviour:
        return self.behaviours.get(version, TYPICAL)

    def next_serial(self) -> int:
        """A number that nothing else has: process ids, connections."""
        self.serial += 1
        return self.serial

    def note(self, kind: str, subject: str, text: str) -> None:
        self.timeline.note(self.queue.now_s, kind, subject, text)
