"""Which cells fail so much that they get nothing for a while. Pure; the time is an argument.

A cell that answers every request with an error at once has the fewest outstanding, so `leastconn` would send it nearly
everything. HAProxy itself takes one away after a few failures in a row, until its next health check; this decides that
it stays away, longer each time. It never takes the last cells of a pool, nor any while no other cell does better: then
it is the requests that are bad, and taking cells away would only add to it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine_agent.ingress.layout import Layout
from engine_agent.ingress.running import RunningServer

Key = tuple[str, str]
"""Backend and name of a server."""


@dataclass(frozen=True, slots=True)
class EjectionLimits:
    """When a cell is ejected and for how long. Shapes and defaults follow Envoy's outlier detection."""

    failures: int = 5
    """In a row of looks in which failures were the rule."""
    failing_share: float = 0.5
    """Of the answers of one look: from here on, failures are the rule."""
    first_s: float = 10.0
    longest_s: float = 300.0
    most_share: float = 0.5
    """Of a pool's cells that may be away at a time, rounded down."""


@dataclass(slots=True)
class _Record:
    answers: int = 0
    failures: int = 0
    run: int = 0
    does_well: bool = False
    until_s: float = 0.0
    times: int = 0


class Ejections:
    """What is known of each cell, and until when it is away. Only answers that an engine gave count."""

    def __init__(self, limits: EjectionLimits | None = None) -> None:
        self._limits = limits or EjectionLimits()
        self._records: dict[Key, _Record] = {}

    def note(self, servers: Iterable[RunningServer], now_s: float) -> frozenset[Key]:
        """Take in a look at the servers. Returns those that are to get nothing."""
        pools: dict[str, list[RunningServer]] = defaultdict(list)
        for server in servers:
            if server.agent_check_port:
                pools[server.backend].append(server)
        seen = {}
        for pool in pools.values():
            for server in pool:
                key = (server.backend, server.name)
                seen[key] = self._looked(self._records.get(key) or _Record(), server, now_s)
        self._records = seen
        for pool in pools.values():
            self._judge(pool, now_s)
        return frozenset(key for key, record in seen.items() if record.until_s > now_s)

    def _looked(self, record: _Record, server: RunningServer, now_s: float) -> _Record:
        answers, failures = server.answers_total - record.answers, server.failures_total - record.failures
        record.answers, record.failures = server.answers_total, server.failures_total
        if answers <= 0:  # nothing new, or a worker that counts from zero
            return record
        if failures < self._limits.failing_share * answers:
            record.run, record.does_well = 0, True
            if now_s > record.until_s + self._limits.longest_s:
                record.times = 0
        else:
            record.run, record.does_well = record.run + failures, False
        return record

    def _judge(self, pool: list[RunningServer], now_s: float) -> None:
        known = [(server, self._records[server.backend, server.name]) for server in pool]
        # One that HAProxy has just marked down for its failures is not usable at this moment.
        records = [record for server, record in known if server.usable or record.run >= self._limits.failures]
        away = sum(record.until_s > now_s for record in records)
        for record in records:
            others = any(other.does_well and other.until_s <= now_s for other in records if other is not record)
            may_go = away + 1 <= self._limits.most_share * len(records)
            if record.until_s <= now_s and record.run >= self._limits.failures and others and may_go:
                record.times += 1
                record.until_s = now_s + min(self._limits.longest_s, self._limits.first_s * 2 ** (record.times - 1))
                record.run = 0
                away += 1


def without(layout: Layout, ejected: frozenset[Key]) -> Layout:
    """The layout with ejected cells drained: what runs there may end, nothing new comes."""
    if not ejected:
        return layout
    servers = (
        replace(server, drain=server.drain or (server.backend, server.name) in ejected) for server in layout.servers
    )
    return replace(layout, servers=tuple(servers))
