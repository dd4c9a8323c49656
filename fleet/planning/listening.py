"""From when a node's silence counts: only while a web process that would receive its reports ran and kept up. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

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
