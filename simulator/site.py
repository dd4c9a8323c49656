"""What everything of a simulated world has in common: its clock, its chance, its lines, and what is written down."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from engine_agent.protocol.messages import Desired, Health, Observed
from simulator.behaviour import VersionBehaviour
from simulator.clock import EventQueue
from simulator.network import Network

TYPICAL = VersionBehaviour()


@dataclass(frozen=True, slots=True)
class Said:
    """A report on its way: the connection it belongs to, and what it says."""

    connection: int
    observed: Observed
    health: Health | None
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the timeline."""

    at_s: float
    kind: str
    subject: str
    text: str


@dataclass
class Journal:
    """What happened, as far as anybody asks afterwards. `starts` counts engines started by (node, cell, generation)
    while the control plane could be reached."""

    entries: list[Entry] = field(default_factory=list)
    violations: list[Entry] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    starts: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def note(self, at_s: float, kind: str, subject: str, text: str) -> None:
        self.counts[kind] += 1
        self.entries.append(Entry(at_s, kind, subject, text))

    def violation(self, at_s: float, invariant: str, text: str) -> None:
        self.violations.append(Entry(at_s, "violation", invariant, text))


class Server(Protocol):
    """The control plane's end of the agents' lines."""

    def joined(self, node: str, connection: int) -> None:
        """A connection was opened."""

    def left(self, node: str, connection: int) -> None:
        """A connection was closed."""

    def heard(self, node: str, said: Said) -> None:
        """A report came."""

    def knows(self, node: str, said: Said) -> bool:
        """Whether this is what was last heard of the node, and nobody wants to tell it anything."""


class Listener(Protocol):
    """An agent's end of its line."""

    def receive(self, order: Desired) -> None:
        """An order came."""


@dataclass
class Site:
    """Shared by all machines of a run. `behaviours`: by version; `steady`: what is repeated without news costs no
    event."""

    queue: EventQueue
    random: Random
    network: Network
    server: Server
    journal: Journal = field(default_factory=Journal)
    behaviours: Mapping[str, VersionBehaviour] = field(default_factory=dict)
    steady: bool = False
    serial: int = 1000

    def behaviour(self, version: str) -> VersionBehaviour:
        return self.behaviours.get(version, TYPICAL)

    def next_serial(self) -> int:
        """A number that nothing else has: process ids, connections."""
        self.serial += 1
        return self.serial

    def note(self, kind: str, subject: str, text: str) -> None:
        self.journal.note(self.queue.now_s, kind, subject, text)
