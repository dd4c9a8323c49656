"""What traffic knows of a large seeded fleet: ingresses that report, published tables, shares, keys and their usage.

Plain rows, in a shape that does not depend on chance. Nothing of it runs.
"""

from datetime import datetime, timedelta

import msgspec

from engine_agent.protocol.ingress_messages import CellEndpoint
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import ServingClass
from fleet.models import Cell, Deployment, Region
from fleet.planning.states import CellState
from traffic.models import ApplicationKey, Ingress, IngressReport, RoutingTable, TrafficMatrix, TrafficShift, UsageHour

KEYS = 1000
HOURS = 48
TABLES = 20
REPORT_IN = timedelta(hours=1)
"""Reports are of a time to come, so that they stay fresh during the measurement."""


def load_test_traffic_seed(*, now: datetime) -> None:
    """One ingress for each region, the last tables of each, shares of each deployment, and a thousand keys."""
    for region in Region.objects.all():
        _region(region, now)
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
    _keys(now)


def _region(region: Region, now: datetime) -> None:
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
            "cells": [_endpoint(cell) for cell, of in cells if of == deployment],
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


def _endpoint(cell: str) -> JsonObject:
    endpoint: JsonObject = msgspec.to_builtins(CellEndpoint(cell, 1, "10.0.0.1", 20_003, max_connections=32))
    return endpoint


def _keys(now: datetime) -> None:
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
