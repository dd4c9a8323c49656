"""Publishes routing tables: a new revision whenever what a region's ingresses must do has changed."""

from collections import Counter
from datetime import datetime

import msgspec
from django.db import IntegrityError, transaction

from engine_agent.protocol.ingress_messages import Pool, Split
from engine_agent.protocol.messages import JsonObject
from fleet.models import Cell, Region
from fleet.planning.states import CellState
from fleet.selectors.snapshot import LISTENING_LEASE
from fleet.services.cell import cell_mark_unrouted
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_held_since
from kernel.tones import Tone
from traffic.models import RoutingTable
from traffic.planning.ingress import plan_unrouted
from traffic.planning.key import describe_keys, key_ring
from traffic.planning.routing import describe_change, describe_splits, plan_pools, plan_splits
from traffic.selectors.key import KEY_RING, key_standing
from traffic.selectors.routing import (
    following_ingresses,
    ingress_addresses,
    latest_tables,
    routable_cells,
    served_deployments,
    tables_in_force,
)
from traffic.selectors.steering import steerings

TABLES_KEPT = 200
"""Old revisions per region that stay for the history page."""


def tables_publish(*, now: datetime) -> list[str]:
    """Publish a table for each region whose pools changed. Returns those regions."""
    # Read first: whoever publishes after this takes our revision, so what we plan is never older than what it replaces.
    current = latest_tables()
    deployments, cells, ingresses = served_deployments(), routable_cells(), ingress_addresses()
    shared = steerings((deployment.name for deployment in deployments), now)
    standing, ingresses_of = key_standing(), Counter(ingress.region for ingress in ingresses)
    splits = plan_splits(deployments, shared)
    published = []
    for region in Region.objects.values_list("name", flat=True):
        pools = plan_pools(region, deployments, cells, ingresses, shared)
        if _publish(region, pools, splits, key_ring(standing, ingresses_of[region]), current.get(region), now):
            published.append(region)
    return published


def _publish(
    region: str,
    pools: tuple[Pool, ...],
    splits: tuple[Split, ...],
    keys: JsonObject,
    current: RoutingTable | None,
    now: datetime,
) -> bool:
    before = msgspec.convert(current.body["pools"], tuple[Pool, ...]) if current else ()
    splits_before = msgspec.convert(current.body.get("splits", ()), tuple[Split, ...]) if current else ()
    keys_before = current.body.get(KEY_RING, {}) if current else {}
    if current is not None and (before, splits_before, keys_before) == (pools, splits, keys):
        return False
    revision = current.revision + 1 if current else 1
    changes = [describe_change(before, pools)] if current is None or before != pools else []
    reason = "; ".join([*changes, *describe_splits(splits_before, splits), *describe_keys(keys_before, keys)])
    body = {
        "pools": msgspec.to_builtins(pools),
        **({"splits": msgspec.to_builtins(splits)} if splits else {}),
        **({KEY_RING: keys} if keys else {}),
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


def drained_cells_mark(*, now: datetime) -> list[str]:
    """Tell the fleet which draining cells get nothing new. Returns those cells."""
    # Read before the tables: a cell that begins to drain later is not judged by a table that is older than that.
    draining = dict(
        Cell.objects.filter(state=CellState.DRAINING.value, unrouted_at__isnull=True).values_list("id", "generation")
    )
    if not draining:
        return []
    unrouted = plan_unrouted(
        draining,
        tables_in_force(),
        following_ingresses(),
        listening_since=lease_held_since(name=LISTENING_LEASE, now=now),
        now=now,
    )
    return [cell for cell in unrouted if cell_mark_unrouted(cell_id=cell, generation=draining[cell], now=now)]
