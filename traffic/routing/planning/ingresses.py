"""Decides when an ingress or its agent must be started, which ingress machines a cloud region needs, and which draining
cells receive no new requests. Pure. Silence never counts as acknowledgement: an ingress that stops reporting delays
drains until it has been silent long enough to count as dead. Cells refuse new work meanwhile."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.reconcile.planning.snapshot import ProviderStatus

RESTART_AFTER_S = 1.0
"""Grace period for an agent to reconnect: the controller may have closed the connection by restarting."""
START_AGAIN_AFTER_S = 5.0
"""Minimum time between two starts, so that a crashing ingress does not cause a start storm."""


@dataclass(frozen=True, slots=True)
class StartIngress:
    """`start_whole` boots the ingress; otherwise only its agent starts, which adopts the running HAProxy."""

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
    """Returns what to start for an ingress that is not connected. `started_at` is the controller's last start."""
    if not known:
        return StartIngress(start_whole=True, reason="first start")
    if status is ProviderStatus.AGENT_DEAD and _has_passed(disconnected_at, now, RESTART_AFTER_S):
        return StartIngress(start_whole=False, reason="HAProxy runs without its agent; restarted the agent")
    if status is ProviderStatus.GONE and _has_passed(started_at, now, START_AGAIN_AFTER_S):
        return StartIngress(start_whole=True, reason="it is not running; restarted it")
    return None


def _has_passed(since: datetime | None, now: datetime, seconds: float) -> bool:
    return since is None or (now - since).total_seconds() >= seconds


SILENT_AFTER_S = 10.0
"""Ingress agents report every 2 s; five missed reports raise doubt, as for nodes."""


@dataclass(frozen=True, slots=True)
class TableInForce:
    """A region's newest table: its revision, and the cells that it sends new requests to."""

    revision: int
    routed: frozenset[str]


@dataclass(frozen=True, slots=True)
class FollowingIngress:
    """An ingress and the revision that it last reported; `last_seen_at` is None if it never reported."""

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
    """Returns the draining cells that no table routes to, once all ingresses follow their tables. Every region must
    follow, because any ingress can reach cells of any region."""
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


# A cloud region has one ingress machine per zone and at least two, so it survives the loss of a zone or machine.

LEAST_IN_REGION = 2


@dataclass(frozen=True, slots=True)
class IngressMachine:
    """An ingress of the region. `zone` is its actual or intended zone; `gone` means that its machine has terminated."""

    id: str
    zone: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class NewIngress:
    zone: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveIngress:
    """Remove the row of an ingress whose machine has terminated."""

    id: str
    reason: str


def plan_ingress_machines(
    zones: Collection[str], there: Sequence[IngressMachine]
) -> tuple[NewIngress | RemoveIngress, ...]:
    """Plans the ingresses of a region with these zones. Running ingresses are never removed, even surplus ones."""
    gone = tuple(RemoveIngress(each.id, "its machine is gone") for each in there if each.gone)
    running = Counter(each.zone for each in there if not each.gone)
    new = [NewIngress(zone, f"zone {zone} has no ingress") for zone in sorted(zones) if not running[zone]]
    running.update(each.zone for each in new)
    while zones and running.total() < LEAST_IN_REGION:
        zone = min(sorted(zones), key=lambda name: running[name])
        new.append(NewIngress(zone, f"a region needs at least {LEAST_IN_REGION} ingresses"))
        running[zone] += 1
    return (*gone, *new)
