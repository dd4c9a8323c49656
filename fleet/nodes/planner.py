"""From when a node's silence counts: only while a web process that would receive its reports ran and kept up. Pure.

Which members of a cell run the same software, as their agents reported, before an engine has started.

Pure. The engines compare again when they meet, with flags and weights; this is what a placement, a page and the gate
before `ready` can know. A node that has reported nothing yet is left out: that is no difference.
"""

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

MOVES_WITHIN = timedelta(seconds=20)
"""How long agents of a web process that has ended need to reach another, from when there is one that keeps up: 15 s
until a ping goes unanswered (`engine_agent.node.connection`), or 5 s between two tries; then a new connection and
its first report."""
EXCUSED_MOST = timedelta(seconds=120)
"""How long the control plane's own trouble can excuse a node, so that a web process that never catches up, or restarts
again and again, cannot hide a dead node."""
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ListenerView:
    """A web process that agents connect to. `since`: since when it has stored its agents' reports without falling
    behind; None while it is behind. It runs until `until`, unless it renews that."""

    since: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class Listeners:
    """The web processes that ran recently, by id."""

    by_id: Mapping[str, ListenerView] = field(default_factory=dict)

    def counts_from(self, heard_at: datetime, listener: str, *, connected: bool, now: datetime) -> datetime:
        """From when the silence of a node counts, `heard_at` or later. `listener`: the process that last received a
        report of it; `connected`: whether that connection is open."""
        own = self.by_id.get(listener)
        if own is not None and own.until > now and connected:
            excused = now if own.since is None else own.since
        else:
            excused = self._all_keep_up_since(now)
            if own is None or own.until <= now:
                excused = max(excused, own.until if own else excused) + MOVES_WITHIN
        return max(heard_at, min(excused, heard_at + EXCUSED_MOST))

    def _all_keep_up_since(self, now: datetime) -> datetime:
        """Since when a node that connects anew is received, whichever process it tries; `now` while one is behind."""
        running = [one for one in self.by_id.values() if one.until > now]
        return max((now if one.since is None else one.since for one in running), default=_LONG_AGO)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Members that run the same, in the order of their ranks."""

    digest: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class StackComparison:
    """Members grouped by what they run, the group of the lowest rank first; `differing` has values by `ranks`."""

    ranks: tuple[Rank, ...]
    groups: tuple[StackGroup, ...]
    differing: tuple[Difference, ...]


def stack_digest(machine: Fingerprint, engine: str) -> str:
    """Equal for nodes that may be in one cell of this engine; empty for a node that has not reported what it runs."""
    return fingerprint_digest(engine_fingerprint(machine, engine)) if machine else ""


def member_stacks(engine: str, members: Iterable[tuple[int, str, Fingerprint]]) -> tuple[Rank, ...]:
    """What members (rank, node, fingerprint of the machine) run of this engine, by rank."""
    known = (Rank(rank, node, engine_fingerprint(machine, engine)) for rank, node, machine in members if machine)
    return tuple(sorted(known, key=lambda rank: rank.rank))


def compare_stacks(ranks: Sequence[Rank]) -> StackComparison:
    """Groups and differing fields of the members of a cell."""
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(fingerprint_digest(rank.fingerprint), []).append(rank)
    return StackComparison(
        ranks=tuple(ranks),
        groups=tuple(StackGroup(digest, tuple(members)) for digest, members in groups.items()),
        differing=differing_fields([rank.fingerprint for rank in ranks]),
    )
