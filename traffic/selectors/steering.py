"""Loads what the region autopilot looks at, in a constant number of queries however many deployments there are."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from django.conf import settings
from django.db.models import Q

from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import CellRole
from fleet.models import Cell, Deployment
from fleet.planning.states import CellState
from fleet.selectors.model_version import concurrency_by_type
from kernel.row_cache import WrittenTables
from models_registry.models import ModelVersion
from models_registry.planning.roles import role_concurrency
from traffic.models import Ingress, IngressReport, TrafficMatrix, TrafficOverride, TrafficRule, TrafficWindow
from traffic.planning.demand_placement import latencies_ms
from traffic.planning.load_window import (
    Sample,
    arrivals_to_expect,
    capacity_to_count_on,
    has_returned,
    is_starting,
    service_time_s,
    share_lost,
)
from traffic.planning.matrix import BadMatrix, Matrix, read_matrix
from traffic.planning.override_preview import OverrideEffect, preview_override
from traffic.planning.overrides import EvacuationMode, OverrideKind, OverrideView, orders_for
from traffic.planning.routing import Steering
from traffic.planning.shift import RegionView, TrafficView
from traffic.planning.traffic_policy import InvalidTrafficPolicy, TrafficPolicy

UP = "up"
"""As an ingress agent reports a cell."""


@dataclass(frozen=True, slots=True)
class IngressView:
    """What an ingress last reported; `seen_at` None: nothing yet that could be counted on."""

    id: str
    seen_at: datetime | None
    cells: dict[str, str]
    telemetry: JsonObject


@dataclass(frozen=True, slots=True)
class ReadyCell:
    """A cell that its fleet calls ready, and how many requests at once its version was tested for on its type."""

    id: str
    deployment: str
    region: str
    instance_type: str
    concurrency: int


def ingress_views() -> dict[str, list[IngressView]]:
    """Region -> its ingresses."""
    views: dict[str, list[IngressView]] = defaultdict(list)
    for ingress in Ingress.objects.select_related("report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        # Without a table, as one starts that has lost its journal, it knows of no cell and cannot say that one is down.
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
    """Deployment -> its policy; those with the defaults, or with one that cannot be read, have none here."""
    return _read_policies()[0]


def _read_policies() -> tuple[dict[str, TrafficPolicy], dict[str, str]]:
    """And deployment -> what is wrong with its policy."""
    policies, problems = {}, {}
    for rule in TrafficRule.objects.all():
        try:
            policies[rule.deployment_id] = rule.policy()
        except InvalidTrafficPolicy as problem:
            problems[rule.deployment_id] = f"its traffic policy cannot be read: {problem}"
    return policies, problems


def _read_matrices() -> tuple[dict[str, Matrix], dict[str, str]]:
    """Deployment -> its shares, and deployment -> what is wrong with them."""
    matrices, problems = {}, {}
    for name, shares in TrafficMatrix.objects.values_list("deployment_id", "shares"):
        try:
            matrices[name] = read_matrix(shares)
        except BadMatrix as problem:
            problems[name] = f"its shares cannot be read: {problem}"
    return matrices, problems


def overrides_in_force(now: datetime) -> tuple[OverrideView, ...]:
    """Orders not ended and not expired."""
    return tuple(override_view(row) for row in active_overrides(now))


def active_overrides(now: datetime) -> Iterable[TrafficOverride]:
    return TrafficOverride.objects.filter(ended_at__isnull=True, expires_at__gt=now).order_by("id")


def override_view(row: TrafficOverride) -> OverrideView:
    """The row as the pure planners take it."""
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
    """Deployment -> what its pools in the routing tables must follow, and deployment -> why nobody can say that.
    `written`: what is known of `STEERING_TABLES`."""
    known = written or WrittenTables(())
    policies, bad_policies = known.get("policies", _RULES, _read_policies)
    matrices, bad_matrices = known.get("matrices", _MATRICES, _read_matrices)
    overrides = known.get_lasting("overrides", _OVERRIDES, lambda: overrides_in_force(now))
    steered = {
        name: Steering(
            matrix=matrices.get(name, {}),
            policy=policies.get(name, TrafficPolicy()),
            closed=orders_for(name, overrides, now).closed,
        )
        for name in deployments
    }
    return steered, bad_matrices | bad_policies


def traffic_views(now: datetime, deployment: str = "") -> dict[str, tuple[TrafficMatrix, TrafficView]]:
    """Deployment -> its row, unsaved before the first plan, and what is decided upon; `deployment` "": all of them."""
    only = Q(name=deployment) if deployment else Q()
    rows = {row.pk: row for row in TrafficMatrix.objects.all()}
    (policies, bad_policies), (_, bad_matrices) = _read_policies(), _read_matrices()
    overrides, ingresses = overrides_in_force(now), ingress_views()
    windows: dict[str, dict[str, tuple[Sample, ...]]] = defaultdict(dict)
    for window in TrafficWindow.objects.filter(region__in=list(ingresses)):
        windows[window.deployment_id][window.region_id] = samples_of(window)
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
                regions=_region_views(windows[name], reported, now),
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
    """The last report of the ingress that has been silent longest."""
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
    """By name of the deployment. `order` need not be stored; it counts as the youngest."""
    order_view = replace(override_view(order), id=sys.maxsize)
    views = traffic_views(now, order.deployment_id or "")
    return tuple(preview_override(view, order_view, now) for _, (_, view) in sorted(views.items()))
