"""Decides whether an ingress that is not connected must be started, and which draining cells get nothing new any more,
from what the ingresses acknowledged. Pure.

Silence is no acknowledgement: while no process listens to ingresses nothing is decided, and one that has gone silent
holds up drains until it has been silent for long enough to count as dead. Cells refuse new work meanwhile."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.reconcile.planning.snapshot import ProviderStatus

RESTART_AFTER_S = 1.0
"""A closed connection may be our own restart; its agent is given this long to come back."""
START_AGAIN_AFTER_S = 5.0
"""Between two starts, so that an ingress that dies at once is not started in a storm."""


@dataclass(frozen=True, slots=True)
class StartIngress:
    """`start_whole`: boot it anew; otherwise only its agent, which adopts the running HAProxy."""

    start_whole: bool
    reason: str


def plan_ingress(
    status: ProviderStatus,
    *,
    known: bool,
    disconnected_at: datetime | None,
    started_at: datetime | None,
    now: datetime,
) -> StartIngress | None:
    """What to start of an ingress that is not connected, if anything. `started_at`: by us, the last time."""
    if not known:
        return StartIngress(start_whole=True, reason="first start")
    if status is ProviderStatus.AGENT_DEAD and _passed(disconnected_at, now, RESTART_AFTER_S):
        return StartIngress(start_whole=False, reason="its agent is dead, HAProxy runs; started the agent again")
    if status is ProviderStatus.GONE and _passed(started_at, now, START_AGAIN_AFTER_S):
        return StartIngress(start_whole=True, reason="it is gone; started it again")
    return None


def _passed(since: datetime | None, now: datetime, seconds: float) -> bool:
    return since is None or (now - since).total_seconds() >= seconds


SILENT_AFTER_S = 10.0
"""Ingress agents report every 2 s; five missed reports raise doubt, as for nodes."""


@dataclass(frozen=True, slots=True)
class TableInForce:
    """The newest table of a region: its revision, and the cells that it sends new requests to."""

    revision: int
    routed: frozenset[str]


@dataclass(frozen=True, slots=True)
class FollowingIngress:
    """An ingress and the revision that it last reported; `last_seen_at` None: it never reported."""

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
    if listening_since is None or any(_is_behind(ingress, tables, listening_since, now) for ingress in ingresses):
        return ()
    return tuple(cell for cell in draining if not any(cell in table.routed for table in tables.values()))


def _is_behind(
    ingress: FollowingIngress, tables: Mapping[str, TableInForce], listening_since: datetime, now: datetime
) -> bool:
    table = tables.get(ingress.region)
    if table is None or ingress.last_seen_at is None or ingress.revision >= table.revision:
        return False
    return (now - max(ingress.last_seen_at, listening_since)).total_seconds() <= SILENT_AFTER_S


# Decides which ingress machines a region of a cloud lacks, and which are gone.
# One in each zone, and two in a region at least: a region whose one zone or one machine fails is still reached.

LEAST_IN_REGION = 2


@dataclass(frozen=True, slots=True)
class IngressMachine:
    """An ingress of the region. `zone`: where it is, or is to be launched. `gone`: its machine was seen to end."""

    id: str
    zone: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class NewIngress:
    """Launch an ingress machine in this zone."""

    zone: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveIngress:
    """Nobody waits for it any more; another takes its place."""

    id: str
    reason: str


def plan_ingress_machines(
    zones: Collection[str], there: Sequence[IngressMachine]
) -> tuple[NewIngress | RemoveIngress, ...]:
    """What to do in a region with these zones. None is ever ended that runs: more than are wanted stay."""
    gone = tuple(RemoveIngress(each.id, "its machine is gone") for each in there if each.gone)
    running = Counter(each.zone for each in there if not each.gone)
    new = [NewIngress(zone, f"zone {zone} has no ingress") for zone in sorted(zones) if not running[zone]]
    running.update(each.zone for each in new)
    while zones and running.total() < LEAST_IN_REGION:
        zone = min(sorted(zones), key=lambda name: running[name])
        new.append(NewIngress(zone, f"a region has {LEAST_IN_REGION} ingresses at least"))
        running[zone] += 1
    return (*gone, *new)
