"""Decides which draining cells get nothing new any more, from what the ingresses acknowledged. Pure.

Silence is no acknowledgement: while nobody listens to ingresses nothing is decided, and one that has gone silent holds
up drains until it has been silent for long enough to count as dead. Cells refuse new work by themselves meanwhile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

SILENT_AFTER_S = 10.0
"""Ingress agents report every 2 s; five missed reports raise doubt, as for nodes."""


@dataclass(frozen=True, slots=True)
class TableInForce:
    """The newest table of a region: its revision, and the cells that it sends new requests to."""

    revision: int
    routed: frozenset[str]


@dataclass(frozen=True, slots=True)
class FollowingIngress:
    """An ingress and the revision that it last said to run; `last_seen_at` None: it never said anything."""

    region: str
    revision: int
    last_seen_at: datetime | None


def plan_unrouted(
    draining: Iterable[str],
    tables: Mapping[str, TableInForce],
    ingresses: Iterable[FollowingIngress],
    *,
    listening_since: datetime | None,
    now: datetime,
) -> tuple[str, ...]:
    """Those of the draining cells to which no table sends anything, once all ingresses follow their tables.

    Cells of any region can be reached through any ingress, so every region must follow.
    """
    if listening_since is None or any(_is_behind(gate, tables, listening_since, now) for gate in ingresses):
        return ()
    return tuple(cell for cell in draining if not any(cell in table.routed for table in tables.values()))


def _is_behind(
    ingress: FollowingIngress, tables: Mapping[str, TableInForce], listening_since: datetime, now: datetime
) -> bool:
    table = tables.get(ingress.region)
    if table is None or ingress.last_seen_at is None or ingress.revision >= table.revision:
        return False
    return (now - max(ingress.last_seen_at, listening_since)).total_seconds() <= SILENT_AFTER_S
