"""What all parts of a simulated world share: clock, random numbers, network, timeline, and the behaviour of
versions."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from random import Random
from typing import Protocol

from engine_agent.protocol.messages import Health, Observed
from engine_agent.protocol.metrics import bucket_of
from fleet.load.planner import CellCounters
from simulator.clock import Action, EventQueue


@dataclass(frozen=True, slots=True)
class NetworkQuality:
    """Seconds, and shares of all messages. `slow_s`: maximum delay of a message, which lets later ones overtake it."""

    latency_s: float = 0.02
    slow_s: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0


QUIET = NetworkQuality()
UNRULY = NetworkQuality(latency_s=0.05, slow_s=3.0, loss=0.05, duplicates=0.05)
"""Worse than any real network between two connected machines."""


class Network:
    """Delivers messages as events, and counts losses and duplicates."""

    def __init__(self, queue: EventQueue, random: Random, quality: NetworkQuality) -> None:
        self.quality = quality
        self.sent = self.lost = self.repeated = 0
        self._queue = queue
        self._random = random

    def carry(self, deliver: Action) -> bool:
        """Delivers a message later, possibly twice or never. Returns whether it was not lost."""
        self.sent += 1
        if self.quality.loss and self._random.random() < self.quality.loss:
            self.lost += 1
            return False
        self._queue.after(self._delay_s(), deliver)
        if self.quality.duplicates and self._random.random() < self.quality.duplicates:
            self.repeated += 1
            self._queue.after(self._delay_s(), deliver)
        return True

    def _delay_s(self) -> float:
        delay_s = self.quality.latency_s * (0.5 + self._random.random())
        if self.quality.slow_s and self._random.random() < 0.1:
            delay_s += self._random.random() * self.quality.slow_s
        return delay_s


SPREAD = ((0.6, 0.1), (0.8, 0.2), (1.0, 0.3), (1.2, 0.2), (1.5, 0.12), (2.0, 0.06), (3.0, 0.02))
"""Distribution of latencies around the typical one: factor, share. It has a heavy tail, like real serving."""
TTFT_S = 0.2
ITL_S = 0.02
TOKENS_PER_REQUEST = 20


@dataclass(frozen=True, slots=True)
class VersionBehaviour:
    """How engines of a version behave, which planners can only observe. Seconds; `load_spread` is the share by which
    loading varies. `fails_after_s`: time from ready to failure. `error_share` of its requests fail, `slowness`
    multiplies its latencies, `requests_per_s` is the load of a cell."""

    load_s: float = 20.0
    load_spread: float = 0.2
    never_starts: bool = False
    fails_after_s: float | None = None
    answers_wrong: bool = False
    error_share: float = 0.0
    slowness: float = 1.0
    requests_per_s: float = 5.0


def counted(behaviour: VersionBehaviour, generation: int, served_s: float) -> CellCounters:
    """Returns the counters of a cell after so long in service, as its proxy would report them."""
    requests = int(behaviour.requests_per_s * served_s)
    errors = int(requests * behaviour.error_share)
    answered = requests - errors
    return CellCounters(
        generation=generation,
        requests=requests,
        errors=errors,
        ttft=_counts(TTFT_S * behaviour.slowness, answered),
        itl=_counts(ITL_S * behaviour.slowness, answered * TOKENS_PER_REQUEST),
    )


@lru_cache(maxsize=4096)
def _counts(typical_s: float, samples: int) -> Mapping[int, int]:
    """Cached: cells that came into service together have the same counts."""
    return {bucket: int(share * samples) for bucket, share in _shares(typical_s).items()}


@cache
def _shares(typical_s: float) -> Mapping[int, float]:
    shares: dict[int, float] = {}
    for factor, share in SPREAD:
        bucket = bucket_of(typical_s * factor)
        shares[bucket] = shares.get(bucket, 0.0) + share
    return shares


TYPICAL = VersionBehaviour()


@dataclass(frozen=True, slots=True)
class AgentReport:
    """A report on its way: its connection, and its content."""

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
    """The events of a run. `starts` counts engines started by (node, cell, generation) while the control plane was
    reachable."""

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
        """Whether this was reported before, will not change without an event, and no desired state waits to be sent."""


@dataclass
class SimulationContext:
    """Shared by all machines of a run. `behaviours`: by version; `skip_repeats`: a repeated report causes no event."""

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
        self.serial += 1
        return self.serial

    def note(self, kind: str, subject: str, text: str) -> None:
        self.timeline.note(self.queue.now_s, kind, subject, text)
