"""Reads the autopilot's input and what routing follows, in a constant number of queries. It never writes."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet

from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.selectors import concurrency_by_type
from fleet.reconcile.planning.states import CellState
from kernel.row_cache import WrittenTables
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.roles import role_concurrency
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficRule, TrafficWindow
from traffic.region_shares.planning.autopilot import OverrideEffect, RegionView, TrafficView, preview_override
from traffic.region_shares.planning.load import (
    Sample,
    arrivals_to_expect,
    capacity_to_count_on,
    has_returned,
    is_starting,
    service_time_s,
    share_lost,
)
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import (
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
