"""Reads the deployments and regions that may lack a usable cell. It never writes."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from django.db.models import Exists, OuterRef

from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell, Disruption
from fleet.deployments.models import DeploymentRegion
from fleet.load.models import RefusedRequests
from fleet.reconcile.planning.states import CellState
from traffic.region_shares.models import TrafficWindow
from traffic.region_shares.planning.autopilot import RegionView, TrafficView
from traffic.region_shares.planning.load import (
    CellStanding,
    Place,
)
from traffic.region_shares.planning.policy import (
    ActiveOverrides,
    overrides_for,
)
from traffic.region_shares.selectors.traffic import IngressView, ingress_views


def places(views: Iterable[TrafficView], windows: Iterable[TrafficWindow], now: datetime) -> list[Place]:
    noted = {(window.deployment_id, window.region_id): window for window in windows}
    wanted = {(row.deployment_id, row.region_id): row.cells_in_force for row in DeploymentRegion.objects.all()}
    found = [
        _unserved_place(view, region, overrides_for(view.deployment, view.overrides, now), wanted, noted)
        for view in views
        for region in view.regions
    ]
    doubtful = [place for place in found if place.served and not place.is_intended and _looks_unserved(place)]
    if not doubtful:
        return found
    return [place for place in found if place not in doubtful] + _with_details(doubtful)


def _looks_unserved(place: Place) -> bool:
    return place.capacity <= 0 or place.emptied


def _unserved_place(
    view: TrafficView,
    region: RegionView,
    orders: ActiveOverrides,
    wanted: dict[tuple[str, str], int],
    noted: dict[tuple[str, str], TrafficWindow],
) -> Place:
    name, before = region.name, noted.get((view.deployment, region.name))
    row = view.in_force.get(name, {})
    is_ordered = name in orders.rows or name in orders.emptying or not view.policy.may_serve(name, name)
    return Place(
        deployment=view.deployment,
        region=name,
        wanted=wanted.get((view.deployment, name), 0),
        capacity=region.capacity_now,
        emptied=bool(row) and row.get(name, 0.0) <= 0 and not is_ordered,
        closed=name in orders.closed,
        elsewhere=tuple(
            one.name
            for one in view.regions
            if one.name != name and one.capacity_now > 0 and view.policy.may_serve(name, one.name)
        ),
        served=before.served if before else False,
        since=before.unserved_since if before else None,
        refused_before=before.refused_before if before else {},
    )


def _with_details(doubtful: list[Place]) -> list[Place]:
    deployments, regions = {each.deployment for each in doubtful}, {each.region for each in doubtful}
    ingresses = ingress_views()
    is_down_on_purpose = Exists(Disruption.objects.filter(cell=OuterRef("pk"), closed_at__isnull=True))
    rows = Cell.objects.filter(deployment__in=deployments, region__in=regions).exclude(state=CellState.STOPPED.value)
    cells: dict[tuple[str, str], list[CellStanding]] = defaultdict(list)
    for cell in rows.exclude(role=CellRole.PREFILL.value).annotate(on_purpose=is_down_on_purpose).order_by("id"):
        cells[cell.deployment_id, cell.region_id].append(_cell_standing(cell, ingresses.get(cell.region_id, [])))
    refused: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in RefusedRequests.objects.filter(deployment__in=deployments, region__in=regions):
        refused[row.deployment, row.region].update(row.codes)
    return [
        replace(
            place,
            cells=tuple(cells[place.deployment, place.region]),
            refused=dict(refused[place.deployment, place.region]),
        )
        for place in doubtful
    ]


def _cell_standing(cell: Cell, ingresses: list[IngressView]) -> CellStanding:
    return CellStanding(
        id=cell.id,
        state=CellState(cell.state),
        since=cell.state_since,
        reason=cell.reason,
        on_purpose=getattr(cell, "on_purpose", False),
        views={ingress.id: ingress.cells.get(cell.id, "unknown") for ingress in ingresses if ingress.seen_at},
    )
