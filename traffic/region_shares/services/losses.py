"""Computes what breaks if a region is lost at the peak of the next day, after each round of forecasts, and stores it
for pages and the API."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from django.conf import settings
from django.db import transaction

from fleet.autoscaling.selectors import place_plans
from fleet.capacity.planning.view import PlacePlan
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import concurrency_on
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import Region
from kernel import live
from models_registry.versions.planning.spec import InvalidVersion
from traffic.demand.models import DemandForecast
from traffic.demand.selectors import FORECAST_FRESH_FOR
from traffic.region_shares.models import RegionLoss
from traffic.region_shares.planning.losses import ExpectedDeployment, ExpectedPlace, plan_region_losses
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import TrafficPolicy
from traffic.region_shares.selectors import traffic_policies

BATCH = "batch"
"""Batches wait: they lack nothing if a region is lost."""


def region_losses_store(*, now: datetime) -> int:
    """Replaces all rows. Returns the number of regions with a shortage. Without recent forecasts there are no rows."""
    rows = DemandForecast.objects.filter(made_at__gt=now - FORECAST_FRESH_FOR).exclude(serving_class=BATCH)
    forecasts = list(rows.defer("ledger", "p50", "p99", "methods"))
    expected = _expected(forecasts, now)
    found = plan_region_losses(
        expected, latencies_ms(Region.objects.values_list("name", flat=True), settings.REGION_LATENCY_MS)
    )
    is_judged = bool(forecasts) and all(row.is_judged for row in forecasts)
    losses = [
        RegionLoss(
            region_id=region,
            made_at=now,
            deployments=len(expected),
            is_judged=is_judged,
            shortages=[asdict(row) | {"at": row.at.isoformat()} for row in rows],
        )
        for region, rows in sorted(found.items())
    ]
    with transaction.atomic():
        RegionLoss.objects.exclude(region__in=found).delete()
        RegionLoss.objects.bulk_create(
            losses,
            update_conflicts=True,  # two controllers may finish a round at the same time
            unique_fields=["region"],
            update_fields=["made_at", "deployments", "is_judged", "shortages"],
        )
    live.push("regions")
    return sum(bool(rows) for rows in found.values())


def _expected(forecasts: list[DemandForecast], now: datetime) -> list[ExpectedDeployment]:
    """Deployments with a forecast."""
    series: dict[str, dict[str, list[DemandForecast]]] = defaultdict(lambda: defaultdict(list))
    for row in forecasts:
        series[row.deployment_id][row.origin_id].append(row)
    live_cells = Cell.objects.exclude(state=CellState.STOPPED.value).filter(deployment__in=series).order_by()
    kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for deployment, region, kind in live_cells.values_list("deployment_id", "region_id", "instance_type_id"):
        kinds[deployment, region][kind] += 1
    policies, plans = traffic_policies(), place_plans(now, series)
    rows = Deployment.objects.filter(name__in=series).select_related("model_version").prefetch_related("regions")
    return [
        _expected_deployment(row, series[row.name], kinds, policies.get(row.name, TrafficPolicy()), plans)
        for row in rows.order_by("name")
    ]


def _expected_deployment(
    row: Deployment,
    origins: Mapping[str, list[DemandForecast]],
    kinds: Mapping[tuple[str, str], Counter[str]],
    policy: TrafficPolicy,
    plans: Mapping[tuple[str, str], PlacePlan],
) -> ExpectedDeployment:
    first = max((one for there in origins.values() for one in there), key=lambda one: one.made_at)
    slots = len(first.p90)
    placed = {place.region_id: place for place in row.regions.all()}
    places = {}
    for region in sorted({*placed, *origins}):
        demand = [
            sum(column) for column in zip(*(_padded(one.p90, slots) for one in origins.get(region, ())), strict=True)
        ]
        per_cell = _tested_per_cell(row, kinds.get((row.name, region), Counter()), policy)
        cells = _cells_by_slot(placed.get(region), plans.get((row.name, region)), slots)
        places[region] = ExpectedPlace(demand or [0.0] * slots, [per_cell * count for count in cells])
    return ExpectedDeployment(row.name, first.made_at, first.slot_s, places, policy)


def _padded(values: list[float], slots: int) -> list[float]:
    return [*values[:slots], *[values[-1] if values else 0.0] * (slots - len(values))]


def _cells_by_slot(place: DeploymentRegion | None, plan: PlacePlan | None, slots: int) -> list[int]:
    """Cells that the plan of the day has where the autoscaler sets them, or else those in force."""
    if place is None:
        return [0] * slots
    if plan is None or place.range is None:
        return [place.cells_in_force] * slots
    return [plan.cells[min(slot, len(plan.cells) - 1)] for slot in range(slots)]


def _tested_per_cell(row: Deployment, kinds: Counter[str], policy: TrafficPolicy) -> float:
    """Mean tested concurrency of its cells there, or that of the preferred type without cells."""
    counted = kinds or Counter({row.instance_types[0]: 1})
    total = 0
    for kind, cells in counted.items():
        try:
            total += cells * (policy.tested_on(kind) or concurrency_on(row.model_version, kind))
        except InvalidVersion:
            continue
    return total / counted.total()
