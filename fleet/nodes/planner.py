"""Decides from when a node's silence counts (only while a web process could receive its reports), from which other
nodes a node fetches an artifact, and which members of a cell run the same software according to their reports. A node
without a report counts as equal; engines compare again when they connect, with flags and weights."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from engine_agent.protocol.fingerprint import (
    Difference,
    Fingerprint,
    Rank,
    differing_fields,
    engine_fingerprint,
    fingerprint_digest,
)
from engine_agent.protocol.machine_messages import is_machine_id
from engine_agent.protocol.messages import HOLDERS_MAX, Holder

LISTENING_TTL = timedelta(seconds=5)
"""For how long a web process counts as running after each renewal, of which there is one a second."""
QUIET_AFTER = timedelta(seconds=3)
"""Web notes the silence of a node after so long. Agents send something every 2.2 s at the latest
(`engine_agent.node.connection.REPORT_INTERVAL_S`)."""
RECONNECT_WITHIN = timedelta(seconds=25)
"""Time that agents of an ended web process need to reach another one that keeps up: 20 s until a ping times out
(`engine_agent.node.connection`) or 5 s between two tries, then a new connection and its first report."""
MAX_EXCUSED = timedelta(seconds=120)
"""Limit of the time for which trouble of the control plane excuses a node, so that web processes that never catch up or
restart repeatedly cannot hide a dead node."""
WAITS_FOR_MACHINE = "it waits for its machine: "
"""Beginning of the reason of a node whose launch is repeated; `NEXT_TRY` follows the reason."""
NEXT_TRY = "; next try at "
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def machine_of(node: str, topology: Sequence[str]) -> str:
    """The machine that a node shares with others, which then is its lowest network node; else the node's own ID."""
    lowest = topology[-1] if topology else ""
    return lowest if is_machine_id(lowest) else node


@dataclass(frozen=True, slots=True)
class HolderView:
    """A node with an artifact, or with a part of it. `is_leaving`: cordoned, or its cell drains."""

    node: str
    region: str
    address: str
    port_base: int | None
    is_whole: bool
    is_ready: bool
    is_leaving: bool


def plan_holders(node: str, region: str, address: str, views: Iterable[HolderView]) -> tuple[Holder, ...]:
    """The nodes from which this one should fetch an artifact, at most `HOLDERS_MAX`: ready ones of its region on other
    machines that do not leave, complete ones first. Different nodes get different ones."""
    found = [
        view
        for view in views
        if view.node != node and view.region == region and view.address not in ("", address)
        if view.port_base is not None and view.is_ready and not view.is_leaving
    ]
    found.sort(key=lambda view: (not view.is_whole, hashlib.sha256(f"{node} {view.node}".encode()).digest()))
    return tuple(Holder(view.node, view.address, view.port_base or 0) for view in found[:HOLDERS_MAX])


@dataclass(frozen=True, slots=True)
class ListenerView:
    """A web process that agents connect to. `since`: when it began to keep up with reports, or None while it is behind.
    It runs until `until` unless it renews that."""

    since: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class Listeners:
    """Web processes that ran recently, by ID."""

    by_id: Mapping[str, ListenerView] = field(default_factory=dict)

    def heard_at(
        self, reported_at: datetime | None, listener: str, *, connected: bool, quiet: bool, now: datetime
    ) -> datetime | None:
        """When the node was last heard, to about a second: its last stored report, or the last renewal of the web
        process that has its open connection and would have noted its silence."""
        own = self.by_id.get(listener)
        if reported_at is None or own is None or quiet or not connected:
            return reported_at
        return max(reported_at, min(own.until - LISTENING_TTL, now))

    def counts_from(self, heard_at: datetime, listener: str, *, connected: bool, now: datetime) -> datetime:
        """From when the node's silence counts, `heard_at` or later. `listener`: the process that received its last
        report; `connected`: whether that connection is open."""
        own = self.by_id.get(listener)
        if own is not None and own.until > now and connected:
            excused = now if own.since is None else own.since
        else:
            excused = self._all_keep_up_since(now)
            if own is None or own.until <= now:
                excused = max(excused, own.until if own else excused) + RECONNECT_WITHIN
        return max(heard_at, min(excused, heard_at + MAX_EXCUSED))

    def _all_keep_up_since(self, now: datetime) -> datetime:
        """Since when every process receives reports of nodes that reconnect; `now` while one is behind."""
        running = [one for one in self.by_id.values() if one.until > now]
        return max((now if one.since is None else one.since for one in running), default=_LONG_AGO)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Members with the same software, by rank."""

    digest: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class StackComparison:
    """Members grouped by software, the group of the lowest rank first. `differing`: values in the order of `ranks`."""

    ranks: tuple[Rank, ...]
    groups: tuple[StackGroup, ...]
    differing: tuple[Difference, ...]


def stack_digest(machine: Fingerprint, engine: str) -> str:
    """Equal for nodes that may be in one cell of this engine; "" for a node without a report."""
    return fingerprint_digest(engine_fingerprint(machine, engine)) if machine else ""


def member_stacks(engine: str, members: Iterable[tuple[int, str, Fingerprint]]) -> tuple[Rank, ...]:
    """The software of members (rank, node, fingerprint of the machine) relevant for this engine, by rank."""
    known = (Rank(rank, node, engine_fingerprint(machine, engine)) for rank, node, machine in members if machine)
    return tuple(sorted(known, key=lambda rank: rank.rank))


def compare_stacks(ranks: Sequence[Rank]) -> StackComparison:
    """Groups and differing fields of a cell's members."""
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(fingerprint_digest(rank.fingerprint), []).append(rank)
    return StackComparison(
        ranks=tuple(ranks),
        groups=tuple(StackGroup(digest, tuple(members)) for digest, members in groups.items()),
        differing=differing_fields([rank.fingerprint for rank in ranks]),
    )
