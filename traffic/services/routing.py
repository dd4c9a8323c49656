"""Publishes routing tables: a new revision whenever what a region's ingresses must do has changed."""

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec
from django.db import IntegrityError, transaction

from engine_agent.protocol.ingress_messages import Pool, Split
from engine_agent.protocol.messages import JsonObject
from fleet.models import Cell
from fleet.planning.states import CellState
from fleet.selectors.snapshot import LISTENING_LEASE
from fleet.services.cell import cell_mark_unrouted
from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_held_since
from kernel.tones import Tone
from traffic.models import RoutingTable
from traffic.planning.ingress import plan_unrouted
from traffic.planning.key import describe_keys, key_ring
from traffic.planning.routing import describe_change, describe_splits, keep_steering, plan_pools, plan_splits
from traffic.selectors.key import KEY_RING
from traffic.selectors.routing import UnreadableTable, following_ingresses
from traffic.selectors.routing_cache import KnownTable, RoutingCache

UNREADABLE = "routing-table-unreadable"
BAD_STEERING = "traffic-policy-unreadable"
TABLES_KEPT = 200
"""Old revisions per region that stay for the history page."""


log = logging.getLogger(__name__)


def tables_publish(*, now: datetime, cache: RoutingCache | None = None) -> list[str]:
    """Publish a table for each region whose pools changed. Returns those regions. `cache`: of earlier passes, which
    plans nothing where all is as it was when there was nothing to publish."""
    known = cache or RoutingCache()
    known.begin()
    # Read first: whoever publishes after this takes our revision, so what we plan is never older than what it replaces.
    current = dict(known.tables())
    known.look()
    deployments, cells, ingresses = known.deployments(), known.routable_cells(), known.ingresses()
    shared, unreadable = known.steerings(now)
    _note_steerings(unreadable, known.open_subjects(BAD_STEERING), now)
    standing, regions, holds = known.key_standing(), known.regions(), known.holds()
    seen = (current, deployments, cells, ingresses, shared, unreadable, standing, regions, holds)
    published = []
    if seen != known.published:
        ingresses_of = Counter(ingress.region for ingress in ingresses)
        splits = plan_splits(deployments, shared)
        for region in regions:
            table = current.get(region)
            before = _in_force(table)
            pools = plan_pools(region, deployments, cells, ingresses, shared, holds)
            pools = keep_steering(pools, (before or _NOTHING).pools, unreadable)
            kept = _kept_splits(splits, before or _NOTHING, unreadable)
            wanted = _Wanted(pools, kept, key_ring(standing, ingresses_of[region]))
            is_new = before != wanted and _publish(region, wanted, before or _NOTHING, table, now)
            if is_new:
                published.append(region)
            if table is not None and table.problem is not None:
                _note_unreadable(region, table.problem, replaced=is_new, now=now)
        known.published = None if published else seen
    known.end()
    return published


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a table states, less its number."""

    pools: tuple[Pool, ...]
    splits: tuple[Split, ...]
    keys: JsonObject


_NOTHING = _Wanted((), (), {})


def _in_force(current: KnownTable | None) -> _Wanted | None:
    """What a table states. None: there is none yet, or nobody can say, so that another one has to take its place."""
    if current is None or current.message is None:
        return None
    return _Wanted(current.message.pools, current.message.splits, current.keys)


def _kept_splits(planned: tuple[Split, ...], before: _Wanted, unreadable: Container[str]) -> tuple[Split, ...]:
    """With the splits of names whose deployments nobody can read, as they were."""
    models = {model for pool in before.pools if pool.name in unreadable for model in pool.models}
    return (*planned, *(split for split in before.splits if split.model in models))


def _note_steerings(unreadable: Mapping[str, str], noted: Iterable[str], now: datetime) -> None:
    """A bad row costs its own deployment an incident: its requests are shared as before until it can be read."""
    for name, problem in unreadable.items():
        summary = f"{name} shares its requests as before: {problem}"
        incident_open(
            kind=BAD_STEERING, subject=name, deployment=name, summary=summary, evidence={"problem": problem}, now=now
        )
    for name in noted:
        if name not in unreadable:
            incidents_close(kind=BAD_STEERING, subject=name, resolution="it can be read again", now=now)


def _note_unreadable(region: str, problem: UnreadableTable, *, replaced: bool, now: datetime) -> None:
    """A bad row costs its own region an incident, which is over once another table has taken its place."""
    log.error("%s", problem)
    summary = f"The routing table {problem}"
    incident_open(kind=UNREADABLE, subject=region, region=region, summary=summary, evidence={}, now=now)
    if replaced:
        incidents_close(kind=UNREADABLE, subject=region, resolution="a new table took its place", now=now)


def _publish(region: str, wanted: _Wanted, before: _Wanted, current: KnownTable | None, now: datetime) -> bool:
    changes = [describe_change(before.pools, wanted.pools)] if current is None or before.pools != wanted.pools else []
    changes += [*describe_splits(before.splits, wanted.splits), *describe_keys(before.keys, wanted.keys)]
    revision, reason = current.revision + 1 if current else 1, "; ".join(changes) or "the one before cannot be read"
    body = {
        "pools": msgspec.to_builtins(wanted.pools),
        **({"splits": msgspec.to_builtins(wanted.splits)} if wanted.splits else {}),
        **({KEY_RING: wanted.keys} if wanted.keys else {}),
    }
    try:
        _store(RoutingTable(region_id=region, revision=revision, body=body, reason=reason, created_at=now))
    except IntegrityError:
        return False  # another worker published this revision; the next pass compares again
    return True


@transaction.atomic
def _store(table: RoutingTable) -> None:
    table.save(force_insert=True)
    event_record(
        kind="traffic.table",
        message=f"{table.region_id} revision {table.revision}: {table.reason}",
        now=table.created_at,
        region=table.region_id,
        tone=Tone.MOVING,
    )
    RoutingTable.objects.filter(region_id=table.region_id, revision__lte=table.revision - TABLES_KEPT).delete()
    live.push("traffic", table.region_id)
    live.push_table(table.region_id)


def drained_cells_mark(*, now: datetime, cache: RoutingCache | None = None) -> list[str]:
    """Tell the fleet which draining cells get nothing new. Returns those cells."""
    # Read before the tables: a cell that begins to drain later is not judged by a table that is older than that.
    draining = dict(
        Cell.objects.filter(state=CellState.DRAINING.value, unrouted_at__isnull=True).values_list("id", "generation")
    )
    if not draining:
        return []
    unrouted = plan_unrouted(
        draining,
        (cache or RoutingCache()).tables_in_force(),
        following_ingresses(),
        listening_since=lease_held_since(name=LISTENING_LEASE, now=now),
        now=now,
    )
    return [cell for cell in unrouted if cell_mark_unrouted(cell_id=cell, generation=draining[cell], now=now)]
