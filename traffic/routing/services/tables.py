"""Publishes a new routing table whenever the plan of a region changes, and marks drained cells. It also creates rows
for load tests. A publisher never replaces a table with one planned from older rows."""

import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from django.db import IntegrityError, transaction

from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, Split
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import ServingClass
from fleet.cells.models import Cell
from fleet.cells.services import cell_mark_unrouted
from fleet.deployments.models import Deployment
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.recorder.planning.loops import Round
from fleet.recorder.services import Recorder
from fleet.regions.models import Region
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_held_since
from kernel.tones import Tone
from traffic.keys.models import ApplicationKey
from traffic.keys.planner import describe_keys, key_ring
from traffic.keys.selectors import KEY_RING
from traffic.region_shares.models import TrafficMatrix, TrafficShift
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.routing.planning.ingresses import plan_unrouted
from traffic.routing.planning.recording import Kept, Publication, round_of, table_change, table_digest
from traffic.routing.planning.tables import (
    HeldDeployment,
    IngressAddress,
    RoutableCell,
    ServedDeployment,
    Steering,
    describe_change,
    describe_ingresses,
    describe_splits,
    keep_steering,
    plan_pools,
    plan_splits,
    sharing_ingresses,
)
from traffic.routing.selectors import KnownTable, RoutingCache, UnreadableTable, following_ingresses
from traffic.usage.models import UsageHour

UNREADABLE = "routing-table-unreadable"
BAD_STEERING = "traffic-policy-unreadable"
TABLES_KEPT = 200
"""Old revisions kept per region for the history page."""


log = logging.getLogger(__name__)


def tables_publish(*, now: datetime, cache: RoutingCache | None = None, recorder: Recorder | None = None) -> list[str]:
    """Publishes a table for each region whose pools changed and returns these regions. A `cache` of earlier passes
    skips planning if nothing has changed since the last pass that published nothing. `recorder`: stores what was
    published."""
    known = cache or RoutingCache()
    known.begin()
    # Read first: a concurrent publisher takes this revision, so a plan never replaces a table that is newer than its
    # input.
    current = dict(known.tables())
    known.check_written()
    deployments, cells, ingresses = known.deployments(), known.routable_cells(), known.ingresses()
    shared, unreadable = known.steerings(now)
    _note_steerings(unreadable, known.open_subjects(BAD_STEERING), now)
    standing, regions, holds = known.key_ring_version(), known.regions(), known.holds()
    seen = (current, deployments, cells, ingresses, shared, unreadable, standing, regions, holds)
    published, changed = [], dict[str, bool]()
    planned: dict[str, tuple[_Wanted, _Wanted]] = {}
    if seen != known.published:
        ingresses_of: dict[str, list[str]] = defaultdict(list)
        for ingress in sorted(ingresses, key=lambda ingress: ingress.id):
            ingresses_of[ingress.region].append(ingress.id)
        splits = plan_splits(deployments, shared)
        for region, serves_grpc in regions.items():
            table = current.get(region)
            before = _in_force(table)
            pools = plan_pools(region, deployments, cells, ingresses, shared, holds)
            pools = keep_steering(pools, (before or _NOTHING).pools, unreadable)
            kept = _kept_splits(splits, before or _NOTHING, unreadable)
            keys, sharing = key_ring(standing, len(ingresses_of[region])), sharing_ingresses(ingresses_of[region])
            wanted = _Wanted(pools, kept, keys, serves_grpc, sharing)
            is_new = before != wanted and _publish_table(region, wanted, before or _NOTHING, table, now)
            planned[region] = before or _NOTHING, wanted
            if before != wanted:
                changed[region] = is_new
            if is_new:
                published.append(region)
            if table is not None and table.problem is not None:
                _note_unreadable(region, table.problem, replaced=is_new, now=now)
        known.published = None if published else seen
    known.end()
    if recorder is not None and published:
        inputs = _Inputs(deployments, cells, ingresses, shared, holds, regions, unreadable)
        recorder.record(_rounds(inputs, planned, changed, now))
    return published


@dataclass(frozen=True, slots=True)
class _Inputs:
    deployments: Iterable[ServedDeployment]
    cells: Iterable[RoutableCell]
    ingresses: Iterable[IngressAddress]
    steerings: Mapping[str, Steering]
    holds: Mapping[str, HeldDeployment]
    regions: Iterable[str]
    unreadable: Mapping[str, str]


def _rounds(
    inputs: _Inputs, planned: Mapping[str, tuple["_Wanted", "_Wanted"]], changed: Mapping[str, bool], now: datetime
) -> Iterator[Round]:
    """One round. `planned`: the tables before and after by region; `changed`: whether the new one was stored."""
    before = {region: table_digest(one.pools, one.splits) for region, (one, _) in planned.items()}
    after = {region: table_digest(planned[region][1].pools, planned[region][1].splits) for region in changed}
    decided = [(table_change(region, before[region], after[region]), stored) for region, stored in changed.items()]
    decisions = [(change, stored) for change, stored in decided if change is not None]
    if not decisions:
        return  # only keys differ
    view = Publication(
        deployments={one.name: one for one in inputs.deployments},
        cells={one.id: one for one in inputs.cells},
        ingresses={one.id: one for one in inputs.ingresses},
        steerings=inputs.steerings,
        holds=inputs.holds,
        regions=tuple(inputs.regions),
        in_force=before,
        unreadable=tuple(inputs.unreadable),
        kept={region: _kept(one, after, inputs.unreadable) for region, (one, after) in planned.items()}
        if inputs.unreadable
        else {},
    )
    yield round_of(view, tuple(change for change, _ in decisions), tuple(stored for _, stored in decisions), now)


def _kept(before: "_Wanted", after: "_Wanted", unreadable: Container[str]) -> Kept:
    pools = tuple(pool for pool in before.pools if pool.name in unreadable)
    models = {model for pool in pools for model in pool.models}
    return Kept(pools, tuple(split for split in before.splits if split.model in models))


@dataclass(frozen=True, slots=True)
class _Wanted:
    pools: tuple[Pool, ...]
    splits: tuple[Split, ...]
    keys: JsonObject
    grpc: bool = False
    ingresses: tuple[str, ...] = ()


_NOTHING = _Wanted((), (), {})


def _in_force(current: KnownTable | None) -> _Wanted | None:
    """Returns the content of a table, or None if it is missing or unreadable and must be replaced."""
    if current is None or current.message is None:
        return None
    message = current.message
    return _Wanted(message.pools, message.splits, current.keys, message.grpc, message.ingresses)


def _kept_splits(planned: tuple[Split, ...], before: _Wanted, unreadable: Container[str]) -> tuple[Split, ...]:
    """Keeps the previous splits of model names whose deployments have an unreadable policy."""
    models = {model for pool in before.pools if pool.name in unreadable for model in pool.models}
    return (*planned, *(split for split in before.splits if split.model in models))


def _note_steerings(unreadable: Mapping[str, str], noted: Iterable[str], now: datetime) -> None:
    """Opens an incident for each deployment with an unreadable row. Its requests are shared as in the previous
    table."""
    for name, problem in unreadable.items():
        summary = f"{name} keeps its last shares: {problem}"
        incident_open(
            kind=BAD_STEERING, subject=name, deployment=name, summary=summary, evidence={"problem": problem}, now=now
        )
    for name in noted:
        if name not in unreadable:
            incidents_close(kind=BAD_STEERING, subject=name, resolution="it is readable again", now=now)


def _note_unreadable(region: str, problem: UnreadableTable, *, replaced: bool, now: datetime) -> None:
    """Opens an incident for each region with an unreadable table. It closes when a new table replaces it."""
    log.error("%s", problem)
    summary = f"The routing table {problem}"
    incident_open(kind=UNREADABLE, subject=region, region=region, summary=summary, evidence={}, now=now)
    if replaced:
        incidents_close(kind=UNREADABLE, subject=region, resolution="a new table replaced it", now=now)


def _publish_table(region: str, wanted: _Wanted, before: _Wanted, current: KnownTable | None, now: datetime) -> bool:
    changes = [describe_change(before.pools, wanted.pools)] if current is None or before.pools != wanted.pools else []
    changes += [*describe_splits(before.splits, wanted.splits), *describe_keys(before.keys, wanted.keys)]
    changes += [f"gRPC {'on' if wanted.grpc else 'off'}"] if before.grpc != wanted.grpc else []
    changes += describe_ingresses(before.ingresses, wanted.ingresses)
    revision, reason = current.revision + 1 if current else 1, "; ".join(changes) or "the previous table is unreadable"
    body = {
        "pools": msgspec.to_builtins(wanted.pools),
        **({"splits": msgspec.to_builtins(wanted.splits)} if wanted.splits else {}),
        **({KEY_RING: wanted.keys} if wanted.keys else {}),
        **({"grpc": True} if wanted.grpc else {}),
        **({"ingresses": list(wanted.ingresses)} if wanted.ingresses else {}),
    }
    try:
        _store_table(RoutingTable(region_id=region, revision=revision, body=body, reason=reason, created_at=now))
    except IntegrityError:
        return False  # another worker published this revision; the next pass compares again
    return True


@transaction.atomic
def _store_table(table: RoutingTable) -> None:
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
    """Marks the draining cells that receive no new requests, and returns them."""
    # Read before the tables, so that a cell that starts to drain later is not compared with an older table.
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


KEYS = 1000
HOURS = 48
TABLES = 20
REPORT_IN = timedelta(hours=1)
"""Reports get a future time so that they stay fresh during the measurement."""


def load_test_traffic_seed(*, now: datetime) -> None:
    """Creates an ingress and tables per region, shares per deployment, and 1,000 keys. No process runs behind them."""
    for region in Region.objects.all():
        _seed_region(region, now)
    regions = list(Region.objects.values_list("name", flat=True))
    shares = {origin: {origin: 0.9, regions[number - 1]: 0.1} for number, origin in enumerate(regions)}
    figures = {"regions": {name: {"demand": 40.0, "load": 30.0, "capacity": 64.0} for name in regions}}
    for deployment in Deployment.objects.all():
        TrafficMatrix.objects.create(
            deployment=deployment, shares=shares, revision=1, moved_at=now, figures=figures, looked_at=now
        )
        TrafficShift.objects.create(
            deployment=deployment, revision=1, kind="relief", shares=shares, moved=0.1, reason="seeded", at=now
        )
    _seed_keys(now)


def _seed_region(region: Region, now: datetime) -> None:
    ingress = Ingress.objects.create(
        id=f"i-{region.name}", region=region, address="127.0.0.1", port=8080 + region.position, created_at=now
    )
    cells = list(
        Cell.objects.filter(region=region, state=CellState.READY.value)
        .values_list("id", "deployment_id")
        .order_by("id")
    )
    IngressReport.objects.create(
        ingress=ingress,
        connected=True,
        last_seen_at=now + REPORT_IN,
        revision=TABLES,
        cells={cell: "up" for cell, _ in cells},
    )
    pools = [
        {
            "name": deployment,
            "models": [deployment],
            "serving_class": ServingClass.REALTIME.value,
            "cells": [_seed_endpoint(cell) for cell, of in cells if of == deployment],
            "spill": [],
            "fractions": {region.name: 1.0},
        }
        for deployment in sorted({deployment for _, deployment in cells})
    ]
    RoutingTable.objects.bulk_create(
        RoutingTable(
            region=region,
            revision=revision,
            body={"pools": pools},
            reason="seeded",
            created_at=now - timedelta(minutes=TABLES - revision),
        )
        for revision in range(1, TABLES + 1)
    )


def _seed_endpoint(cell: str) -> JsonObject:
    endpoint: JsonObject = msgspec.to_builtins(CellEndpoint(cell, 1, "10.0.0.1", 20_003, max_connections=32))
    return endpoint


def _seed_keys(now: datetime) -> None:
    hour = now.replace(minute=0, second=0, microsecond=0)
    keys = [
        ApplicationKey(
            prefix=f"{number:010x}",
            digest=f"{number:064x}",
            name=f"application {number}",
            tenant=f"tenant-{number % 100:02d}",
            created_by="switchyard",
            created_at=now,
        )
        for number in range(KEYS)
    ]
    ApplicationKey.objects.bulk_create(keys)
    UsageHour.objects.bulk_create(
        (
            UsageHour(
                tenant=f"tenant-{tenant:02d}",
                key=keys[tenant].prefix,
                deployment="d",
                serving_class="realtime",
                hour=hour - timedelta(hours=back),
                requests=1000 + back,
            )
            for tenant in range(100)
            for back in range(HOURS)
        ),
        batch_size=1000,
    )
