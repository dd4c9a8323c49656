"""Outlier ejection: which cells fail so much that they get nothing for a while. Pure; the time is an argument.

A cell that answers every request with an error at once has the fewest outstanding, so `leastconn` would send it nearly
everything. HAProxy itself marks one down after a few failures in a row, until its next health check; this decides that
it stays ejected, longer each time. It never takes the last cells of a pool, nor any while no other cell does better:
then it is the requests that are bad, and ejecting cells would only add to it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine_agent.ingress.desired import LOCAL_PREFIX, DesiredHaproxy, ServerKey
from engine_agent.ingress.running import RunningServer


@dataclass(frozen=True, slots=True)
class EjectionSettings:
    """When a cell is ejected and for how long. Shapes and defaults follow Envoy's outlier detection."""

    failures: int = 5
    """In a row, over samples in which failures were the rule."""
    failing_share: float = 0.5
    """Of the responses of one sample: from here on, failures are the rule."""
    first_s: float = 10.0
    longest_s: float = 300.0
    max_ejected_share: float = 0.5
    """Of a pool's cells that may be ejected at a time, rounded down."""


@dataclass(slots=True)
class _Record:
    responses: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    succeeds: bool = False
    ejected_until_s: float = 0.0
    ejections: int = 0


class Ejections:
    """What is known of each cell, and until when it is ejected. Only responses of an engine count."""

    def __init__(self, settings: EjectionSettings | None = None) -> None:
        self._settings = settings or EjectionSettings()
        self._records: dict[ServerKey, _Record] = {}

    def note(self, servers: Iterable[RunningServer], now_s: float) -> frozenset[ServerKey]:
        """Take in a sample of the servers' counters. Returns those that are to get nothing."""
        pools: dict[str, list[RunningServer]] = defaultdict(list)
        for server in servers:
            if server.backend.startswith(LOCAL_PREFIX):
                pools[server.backend].append(server)
        seen = {}
        for pool in pools.values():
            for server in pool:
                key = (server.backend, server.name)
                seen[key] = self._sampled(self._records.get(key) or _Record(), server, now_s)
        self._records = seen
        for pool in pools.values():
            self._eject(pool, now_s)
        return frozenset(key for key, record in seen.items() if record.ejected_until_s > now_s)

    def _sampled(self, record: _Record, server: RunningServer, now_s: float) -> _Record:
        responses, failures = server.responses_total - record.responses, server.failures_total - record.failures
        record.responses, record.failures = server.responses_total, server.failures_total
        if responses <= 0:  # nothing new, or a worker that counts from zero
            return record
        if failures < self._settings.failing_share * responses:
            record.failures_in_a_row, record.succeeds = 0, True
            if now_s > record.ejected_until_s + self._settings.longest_s:
                record.ejections = 0
        else:
            record.failures_in_a_row, record.succeeds = record.failures_in_a_row + failures, False
        return record

    def _eject(self, pool: list[RunningServer], now_s: float) -> None:
        limits = self._settings
        known = [(server, self._records[server.backend, server.name]) for server in pool]
        # One that HAProxy has just marked down for its failures is not usable at this moment.
        records = [record for server, record in known if server.usable or record.failures_in_a_row >= limits.failures]
        ejected = sum(record.ejected_until_s > now_s for record in records)
        for record in records:
            others = any(o.succeeds and o.ejected_until_s <= now_s for o in records if o is not record)
            has_room = ejected + 1 <= limits.max_ejected_share * len(records)
            fails = record.ejected_until_s <= now_s and record.failures_in_a_row >= limits.failures
            if fails and others and has_room:
                record.ejections += 1
                record.ejected_until_s = now_s + min(limits.longest_s, limits.first_s * 2 ** (record.ejections - 1))
                record.failures_in_a_row = 0
                ejected += 1


def drain_ejected(desired: DesiredHaproxy, ejected: frozenset[ServerKey]) -> DesiredHaproxy:
    """The desired state with ejected cells drained: what runs there may end, nothing new comes."""
    if not ejected:
        return desired
    servers = (
        replace(server, drain=server.drain or (server.backend, server.name) in ejected) for server in desired.servers
    )
    return replace(desired, servers=tuple(servers))
