"""Reads what the next day is expected to bring to each deployment, from forecasts, plans and rollouts. It never
writes."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import Count, Max

from fleet.autoscaling.selectors import place_plans
from fleet.capacity.models import DayPlan
from fleet.capacity.planning.view import PlacePlan
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import concurrency_on
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.spec import InvalidVersion
from traffic.demand.models import DemandForecast
from traffic.demand.selectors import FORECAST_FRESH_FOR
from traffic.region_shares.models import TrafficRule
from traffic.region_shares.planning.losses import ExpectedDeployment, ExpectedPlace
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import (
    TrafficPolicy,
)
from traffic.region_shares.selectors.traffic import traffic_policies

PLACE_COLUMNS = ("pk", "cells", "cells_min", "cells_max", "cells_granted", "by_type")
BATCH = "batch"
"""Batches wait: they lack nothing if a region is lost."""


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """Deployments with a recent forecast of the next day, once their rollouts are over. `unknown`: deployments without
    one. `is_judged`: all forecasts are based on past errors. `regions` in their order, `latency_ms` between each pair
    of them."""

    deployments: tuple[ExpectedDeployment, ...]
    unknown: tuple[str, ...]
    is_judged: bool
    regions: tuple[str, ...]
    latency_ms: Mapping[tuple[str, str], float]


def expected_load(now: datetime) -> ExpectedLoad:
    """In a constant number of queries. Inside the transaction of a preview: what its steps leave."""
    recent = DemandForecast.objects.filter(made_at__gt=now - FORECAST_FRESH_FOR).exclude(serving_class=BATCH)
    forecasts = list(recent.defer("ledger", "p50", "p99", "methods"))
    is_judged = bool(forecasts) and all(row.is_judged for row in forecasts)
    series: dict[str, dict[str, list[DemandForecast]]] = defaultdict(lambda: defaultdict(list))
    for row in forecasts:
        series[row.deployment_id][row.origin_id].append(row)
    live_cells = Cell.objects.exclude(state=CellState.STOPPED.value).filter(deployment__in=series).order_by()
    kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for deployment, region, kind in live_cells.values_list("deployment_id", "region_id", "instance_type_id"):
        kinds[deployment, region][kind] += 1
    policies, plans, targets = traffic_policies(), place_plans(now, series), _rollout_targets()
    rows = Deployment.objects.filter(name__in=series).select_related("model_version").prefetch_related("regions")
    deployments = tuple(
        _expected_deployment(
            row,
            targets.get(row.name, row.model_version),
            series[row.name],
            kinds,
            policies.get(row.name, TrafficPolicy()),
            plans,
        )
        for row in rows.order_by("name")
    )
    regions = tuple(Region.objects.order_by("position", "name").values_list("name", flat=True))
    unknown = Deployment.objects.exclude(name__in=series).order_by("name").values_list("name", flat=True)
    return ExpectedLoad(
        deployments, tuple(unknown), is_judged, regions, latencies_ms(regions, settings.REGION_LATENCY_MS)
    )


def expected_load_inputs(now: datetime) -> dict[str, str]:
    """Short texts that change with the inputs of `expected_load`, except the instance types of running cells: one of
    the fleet and one of its forecast. Seven queries, which read no series."""
    recent = DemandForecast.objects.filter(made_at__gt=now - FORECAST_FRESH_FOR).exclude(serving_class=BATCH)
    plans = DayPlan.objects.filter(at__lte=now).order_by("-at").values_list("at", flat=True)
    forecast = (recent.aggregate(Max("made_at"), Count("pk")), plans.first())
    fleet = (
        list(Region.objects.order_by("position", "name").values_list("name", flat=True)),
        list(Deployment.objects.order_by("name").values_list("name", "model_version_id", "instance_types")),
        list(DeploymentRegion.objects.order_by("pk").values_list(*PLACE_COLUMNS)),
        list(Rollout.objects.filter(state__in=ACTIVE).order_by("pk").values_list("pk", "state")),
        list(TrafficRule.objects.order_by("pk").values_list("pk", "revision")),
    )
    return {name: _fingerprint(read) for name, read in (("the fleet", fleet), ("the forecast", forecast))}


def _fingerprint(read: object) -> str:
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def _rollout_targets() -> dict[str, ModelVersion]:
    """Deployment -> the version that it has after its active rollout."""
    rows = Rollout.objects.filter(state__in=ACTIVE).select_related("from_version", "to_version")
    return {
        row.deployment_id: row.from_version if row.state == RolloutState.ROLLING_BACK.value else row.to_version
        for row in rows
    }


def _expected_deployment(
    row: Deployment,
    version: ModelVersion,
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
        place = placed.get(region)
        found = Counter(place.by_type) if place and place.by_type else kinds.get((row.name, region), Counter())
        per_cell = _tested_per_cell(row.instance_types, version, found, policy)
        cells = _cells_by_slot(place, plans.get((row.name, region)), slots)
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
    return [place.range.clamped(plan.cells[min(slot, len(plan.cells) - 1)]) for slot in range(slots)]


def _tested_per_cell(
    instance_types: Sequence[str], version: ModelVersion, kinds: Counter[str], policy: TrafficPolicy
) -> float:
    """Mean tested concurrency of its cells there, or that of the preferred type without cells on one of its types."""
    known = Counter({kind: cells for kind, cells in kinds.items() if kind in instance_types and cells > 0})
    counted = known or Counter({instance_types[0]: 1})
    total = 0
    for kind, cells in counted.items():
        try:
            total += cells * (policy.tested_on(kind) or concurrency_on(version, kind))
        except InvalidVersion:
            continue
    return total / counted.total()
