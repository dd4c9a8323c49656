"""Two regions with cells, ingresses and traffic, as rows; reports advance time."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Max

from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.reconcile.planning.states import CellState
from fleet.recorder.services import Recorder
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.planning.recording import AUTOPILOT
from traffic.region_shares.services.autopilot import autopilot_run
from traffic.routing.models import IngressReport, RoutingTable
from traffic.routing.planning.recording import PUBLICATION
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish

EAST, WEST = "us-east-1", "us-west-2"
SLOTS = 10
"""Concurrent requests per cell."""


class Steered:
    """`rates`: requests per second of each region's applications; each takes one second."""

    REPORT_EVERY_S = 2

    def __init__(self, cells: dict[str, int], rates: dict[str, float]) -> None:
        self.now = NOW
        self.rates = rates
        self.silent: set[str] = set()
        self.without_table: set[str] = set()
        self.autopilots: Recorder | None = None
        self.publications: Recorder | None = None
        self._totals: dict[str, float] = dict.fromkeys(cells, 0.0)
        version = rows.version(max_concurrency=SLOTS)
        for port, (region, count) in enumerate(cells.items()):
            deployment = rows.deployment(where=region)
            DeploymentRegion.objects.filter(region_id=region).update(cells=count)
            ingress = ingress_create(region=rows.region(region), address="127.0.0.1", port=8080 + port, now=NOW)
            IngressReport.objects.create(ingress=ingress, connected=True, revision=1)
            for number in range(count):
                name = f"{deployment.name}-{region}-{number}"
                node = rows.node(f"n-{port}{number:07x}", where=region)
                rows.cell(name, node, region=rows.region(region), model_version=version)

    def record(self) -> None:
        """The following passes are recorded."""
        self.autopilots, self.publications = Recorder(AUTOPILOT), Recorder(PUBLICATION)

    def lose(self, region: str, count: int) -> None:
        ids = list(Cell.objects.filter(region_id=region, state=CellState.READY).values_list("id", flat=True)[:count])
        Cell.objects.filter(id__in=ids).update(state=CellState.LOST.value)

    def recover(self, region: str) -> None:
        Cell.objects.filter(region_id=region).update(state=CellState.READY.value)

    def run(self, seconds: float) -> list[str]:
        """Advances time; returns the changed deployments of each pass with changes."""
        changed = []
        until = self.now + timedelta(seconds=seconds)
        while self.now < until:
            self.now += timedelta(seconds=self.REPORT_EVERY_S)
            self._report()
            changed += autopilot_run(now=self.now, recorder=self.autopilots)
        tables_publish(now=self.now, recorder=self.publications)
        return changed

    def row(self, region: str) -> dict[str, float]:
        """The shares of a region's table."""
        newest = RoutingTable.objects.filter(region_id=region).latest("revision")
        fractions: dict[str, float] = newest.body["pools"][0]["fractions"]
        return fractions

    def _report(self) -> None:
        for region, rate in self.rates.items():
            if region in self.silent:
                continue
            self._totals[region] += self.REPORT_EVERY_S * rate
            cells = Cell.objects.filter(region_id=region, state=CellState.READY).values_list("id", flat=True)
            telemetry = _telemetry(round(self._totals[region]), rate, list(cells))
            stated = {"telemetry": telemetry, "cells": dict.fromkeys(cells, "up"), "revision": 1}
            if region in self.without_table:
                stated = {"telemetry": {}, "cells": {}, "revision": 0}
            IngressReport.objects.filter(ingress__region_id=region).update(last_seen_at=self.now, **stated)


def _telemetry(total: int, rate: float, cells: list[str]) -> dict[str, Any]:
    """Reports without spilled requests, since only arrivals matter here."""
    pool = {"requests_total": total, "spilled_to": {}}
    busy = {cell: {"in_flight": rate / len(cells)} for cell in cells}
    return {"worker_pid": 1, "pools": {"sim-70b": pool}, "cells": busy}


def newest_revision(region: str) -> int:
    found: int = RoutingTable.objects.filter(region_id=region).aggregate(newest=Max("revision"))["newest"]
    return found


def seconds_since(start: datetime, now: datetime) -> float:
    return (now - start).total_seconds()
