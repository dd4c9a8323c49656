"""Reads the autopilot's input in a constant number of queries, and the deployments and regions that may lack a usable
cell. It never writes."""

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Count, Exists, Max, OuterRef, Q, QuerySet

from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import CellRole
from fleet.autoscaling.selectors import place_plans
from fleet.capacity.models import DayPlan
from fleet.capacity.planning.view import PlacePlan
from fleet.cells.models import Cell, Disruption
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import concurrency_by_type, concurrency_on
from fleet.load.models import RefusedRequests
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from kernel.row_cache import WrittenTables
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.roles import role_concurrency
from models_registry.versions.planning.spec import InvalidVersion
from traffic.demand.models import DemandForecast
from traffic.demand.selectors import FORECAST_FRESH_FOR
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficRule, TrafficWindow
from traffic.region_shares.planning.autopilot import OverrideEffect, RegionView, TrafficView, preview_override
from traffic.region_shares.planning.load import (
    CellStanding,
    Place,
    Sample,
    arrivals_to_expect,
    capacity_to_count_on,
    has_returned,
    is_starting,
    service_time_s,
    share_lost,
)
from traffic.region_shares.planning.losses import ExpectedDeployment, ExpectedPlace
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import (
    ActiveOverrides,
    BadMatrix,
    EvacuationMode,
    InvalidTrafficPolicy,
    Matrix,
    OverrideKind,
    OverrideView,
    TrafficPolicy,
    overrides_for,
    read_matrix,
)
from traffic.routing.models import Ingress, IngressReport
from traffic.routing.planning.tables import Steering

UP = "up"
"""State of a usable cell in reports of ingress agents."""


@dataclass(frozen=True, slots=True)
class IngressView:
    """The last report of an ingress; `seen_at` is None without a usable report."""

    id: str
    seen_at: datetime | None
    cells: dict[str, str]
    telemetry: JsonObject


@dataclass(frozen=True, slots=True)
class ReadyCell:
    """A ready cell, and the concurrency that its version was tested for on its instance type."""

    id: str
    deployment: str
    region: str
    instance_type: str
    concurrency: int


def ingress_views() -> dict[str, list[IngressView]]:
    views: dict[str, list[IngressView]] = defaultdict(list)
    for ingress in Ingress.objects.select_related("report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        # An ingress without a table, such as one that lost its journal, knows no cells and cannot report one as down.
        view = (
            IngressView(ingress.id, report.last_seen_at, report.cells, report.telemetry)
            if report and report.revision > 0
            else IngressView(ingress.id, None, {}, {})
        )
        views[ingress.region_id].append(view)
    return dict(views)


def ready_cells() -> list[ReadyCell]:
    rows = Cell.objects.filter(state=CellState.READY.value).exclude(role=CellRole.PREFILL.value).order_by("id")
    columns = rows.values_list(
        "id",
        "deployment_id",
        "region_id",
        "instance_type_id",
        "role",
        "model_version__roles",
        "model_version__max_concurrency",
        "model_version_id",
        "model_version__by_type",
    )
    there = list(columns)
    differing = {version for *_, version, by_type in there if by_type}
    versions = ModelVersion.objects.in_bulk(differing) if differing else {}
    of_types = {version: concurrency_by_type(row) for version, row in versions.items()}
    return [
        ReadyCell(
            name,
            deployment,
            region,
            kind,
            of_types.get(version, {}).get((kind, role), role_concurrency(roles).get(role, most)),
        )
        for name, deployment, region, kind, role, roles, most, version, _ in there
    ]


def traffic_policies() -> dict[str, TrafficPolicy]:
    """Returns policies by deployment, without default and unreadable ones."""
    return _read_policies()[0]


def _read_policies() -> tuple[dict[str, TrafficPolicy], dict[str, str]]:
    policies, problems = {}, {}
    for rule in TrafficRule.objects.all():
        try:
            policies[rule.deployment_id] = rule.policy()
        except InvalidTrafficPolicy as problem:
            problems[rule.deployment_id] = f"its traffic policy cannot be read: {problem}"
    return policies, problems


def _read_matrices(rows: Iterable[tuple[str, Any]] | None = None) -> tuple[dict[str, Matrix], dict[str, str]]:
    matrices, problems = {}, {}
    for name, shares in rows or TrafficMatrix.objects.values_list("deployment_id", "shares"):
        try:
            matrices[name] = read_matrix(shares)
        except BadMatrix as problem:
            problems[name] = f"its shares cannot be read: {problem}"
    return matrices, problems


def overrides_in_force(now: datetime) -> tuple[OverrideView, ...]:
    return tuple(override_view(row) for row in active_overrides(now))


def active_overrides(now: datetime) -> "QuerySet[TrafficOverride]":
    return TrafficOverride.objects.filter(ended_at__isnull=True, expires_at__gt=now).order_by("id")


def shares_fixed(deployment: str, origin: str, now: datetime) -> TrafficOverride | None:
    """The override that fixes the shares of these requests, or None."""
    return active_overrides(now).filter(kind=OverrideKind.SHARES, deployment_id=deployment, region_id=origin).last()


def evacuation_of(region: str, deployment: str, now: datetime) -> TrafficOverride | None:
    """The newest evacuation of the region that concerns a deployment; without a deployment, any; or None."""
    found = active_overrides(now).filter(kind=OverrideKind.EVACUATION, region_id=region)
    if deployment:
        found = found.filter(Q(deployment=None) | Q(deployment_id=deployment))
    return found.last()


def override_view(row: TrafficOverride) -> OverrideView:
    return OverrideView(
        id=row.pk or 0,
        kind=OverrideKind(row.kind),
        deployment=row.deployment_id or "",
        region=row.region_id,
        expires_at=row.expires_at,
        shares=row.shares,
        mode=EvacuationMode(row.mode) if row.mode else EvacuationMode.DRILL,
    )


STEERING_TABLES = ("traffic_trafficrule", "traffic_trafficmatrix", "traffic_trafficoverride")
_RULES, _MATRICES, _OVERRIDES = ((table,) for table in STEERING_TABLES)


def steerings(
    deployments: Iterable[str], now: datetime, written: WrittenTables | None = None
) -> tuple[dict[str, Steering], dict[str, str]]:
    """Returns what routing pools must follow, and errors of unreadable rows, by deployment. `written` caches the rows
    of `STEERING_TABLES`."""
    known = written or WrittenTables(())
    policies, bad_policies = known.get("policies", _RULES, _read_policies)
    matrices, bad_matrices = known.get("matrices", _MATRICES, _read_matrices)
    overrides = known.get_lasting("overrides", _OVERRIDES, lambda: overrides_in_force(now))
    steered = {
        name: Steering(
            matrix=matrices.get(name, {}),
            policy=policies.get(name, TrafficPolicy()),
            closed=overrides_for(name, overrides, now).closed,
        )
        for name in deployments
    }
    return steered, bad_matrices | bad_policies


def traffic_views(
    now: datetime,
    deployment: str = "",
    ingresses: dict[str, list[IngressView]] | None = None,
    windows: Iterable[TrafficWindow] | None = None,
) -> dict[str, tuple[TrafficMatrix, TrafficView]]:
    """Returns the row (unsaved before the first plan) and the planner's input, by deployment; "" means all.
    `ingresses` and `windows` are read if they are None."""
    only = Q(name=deployment) if deployment else Q()
    rows = {row.pk: row for row in TrafficMatrix.objects.all()}
    policies, bad_policies = _read_policies()
    _, bad_matrices = _read_matrices((name, row.shares) for name, row in rows.items())
    overrides, ingresses = overrides_in_force(now), ingresses or ingress_views()
    samples: dict[str, dict[str, tuple[Sample, ...]]] = defaultdict(dict)
    for window in TrafficWindow.objects.all() if windows is None else windows:
        if window.region_id in ingresses:
            samples[window.deployment_id][window.region_id] = samples_of(window)
    latency = latencies_ms(ingresses, settings.REGION_LATENCY_MS)
    reported = {region: _oldest_report(there) for region, there in ingresses.items()}
    views = {}
    for name in (
        Deployment.objects.filter(only).exclude(name__in={*bad_policies, *bad_matrices}).values_list("name", flat=True)
    ):
        row = rows.get(name) or TrafficMatrix(deployment_id=name)
        views[name] = (
            row,
            TrafficView(
                deployment=name,
                regions=_region_views(samples[name], reported, now),
                in_force=row.shares,
                moved_at=row.moved_at,
                policy=policies.get(name, TrafficPolicy()),
                overrides=overrides,
                latency_ms=latency,
            ),
        )
    return views


def samples_of(window: TrafficWindow) -> tuple[Sample, ...]:
    return tuple(Sample(*numbers) for numbers in window.samples)


def _oldest_report(ingresses: list[IngressView]) -> datetime | None:
    seen = [ingress.seen_at for ingress in ingresses]
    return min((moment for moment in seen if moment is not None), default=None) if None not in seen else None


def _region_views(
    windows: dict[str, tuple[Sample, ...]], reported: dict[str, datetime | None], now: datetime
) -> tuple[RegionView, ...]:
    request_s = service_time_s([sample for samples in windows.values() for sample in samples])
    at = now.timestamp()
    return tuple(
        RegionView(
            name=region,
            demand=arrivals_to_expect(windows.get(region, ())) * request_s,
            capacity=capacity_to_count_on(windows.get(region, ()), at),
            capacity_now=windows[region][-1].capacity if windows.get(region) else 0.0,
            share_lost=share_lost(windows.get(region, ()), at),
            reported_at=seen,
            starting=is_starting(windows.get(region, ()), at),
            returned=has_returned(windows.get(region, ())),
        )
        for region, seen in sorted(reported.items())
    )


def override_effects(order: TrafficOverride, now: datetime) -> tuple[OverrideEffect, ...]:
    """Predicts the effects by deployment. `override` need not be stored and counts as the newest."""
    order_view = replace(override_view(order), id=sys.maxsize)
    views = traffic_views(now, order.deployment_id or "")
    return tuple(preview_override(view, order_view, now) for _, (_, view) in sorted(views.items()))


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
