"""Loads the fleet for planners in a constant number of queries: large tables from a cache, the rest completely. Never
writes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import Q, Value

from fleet.autoscaling.selectors import PLANNED_CELLS_OF, planned_place_cells
from fleet.capacity.planning.pools import InvalidMarkets, parse_markets
from fleet.capacity.planning.view import LEAVING, PlannedSpares, planned_spares
from fleet.capacity.selectors import machine_prices
from fleet.cells.models import Cell, Disruption
from fleet.clouds.models import CloudNotice
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import ClaimView, GrantRule, InvalidPolicy, QuotaView
from fleet.faults.planning.views import NoticeView
from fleet.faults.selectors.faults import faults_view
from fleet.machines.planner import LOCAL, POOLED, provider_limits
from fleet.machines.selectors import divided_regions, free_machines, machine_views
from fleet.nodes.models import AgentListener
from fleet.nodes.planner import Listeners, ListenerView
from fleet.quotas.models import Quota
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import (
    WITHOUT_MACHINES,
    CellView,
    DeploymentView,
    FleetView,
    MachineView,
    RegionView,
    RolloutView,
    VersionView,
)
from fleet.reconcile.planning.states import MachineRole, NoticeKind
from fleet.reconcile.selectors.cache import FleetCache
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import active_rollouts, rollout_view
from kernel.leases import lease_held_since
from kernel.row_cache import WrittenTables
from models_registry.builds.selectors import build_digests
from models_registry.instance_types.planner import InstanceShape
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import network_nodes_shared, nodes_per_cell
from models_registry.versions.planning.lifecycle import artifacts_of
from models_registry.versions.planning.roles import apart_objection
from models_registry.versions.planning.spec import InvalidVersion

_OF_DEPLOYMENTS = (
    "fleet_deployment", "models_registry_instancetype", "models_registry_modelversion", "models_registry_model",
)  # fmt: skip
_OF_ROLLOUTS = ("fleet_rollout", "models_registry_benchmark", *_OF_DEPLOYMENTS)
Builds = Callable[[], Mapping[str, str]]
"""Digests of engine builds by name, loaded only if a version names one."""
LISTENING_LEASE = "agent-ingest"
"""Held by the web processes that keep up with their agents. Silence counts only while it is held."""


def fleet_view(*, now: datetime, settings: FleetSettings | None = None, cache: FleetCache | None = None) -> FleetView:
    """The whole fleet, with recent provider status of nodes in doubt. With the `cache` of an earlier view, only changes
    are loaded."""
    known = cache or FleetCache()
    known.refresh(settings or FleetSettings(), now)
    written = known.written
    cells, active = known.cells, written.get("rollouts", _OF_ROLLOUTS, active_rollouts)
    rollouts, unreadable = _rollouts(active)
    judged = [cell for cell in cells.values() if cell.deployment in rollouts]
    cells |= {cell.id: cell for cell in known.with_counters(judged)}
    builds = partial(written.get, "builds", ["models_registry_enginebuild"], build_digests)
    deployments = {view.name: view for view in _deployments(written, known.versions, active, unreadable, builds)}
    regions = _regions(written.get("regions", ["fleet_region"], lambda: list(Region.objects.all())))
    since = now - timedelta(seconds=(settings or FleetSettings()).ledger.layout_counts_s)
    has_pools = any(region.free is not None for region in regions.values())
    changing = written.get("layouts", ["fleet_disruption"], _layouts_changing) if has_pools else []
    return FleetView(
        regions=_with_prices(regions, deployments.values(), written, now),
        nodes=known.nodes,
        cells=cells,
        deployments=deployments,
        listening_since=lease_held_since(name=LISTENING_LEASE, now=now),
        rollouts=rollouts,
        faults=faults_view(now=now, windows=known.windows, written=written),
        notices=written.get("notices", ["fleet_cloudnotice", "fleet_node"], lambda: tuple(_notices())),
        quotas=written.get("quotas", ["fleet_quota"], quota_views),
        planned=written.get("planned", PLANNED_CELLS_OF, planned_place_cells),
        listeners=Listeners({row.id: ListenerView(row.since, row.until) for row in AgentListener.objects.all()}),
        machines=_machines(cells.values(), regions, written),
        layouts_changing=Counter(region for region, opened_at in changing if opened_at >= since),
    )


def _layouts_changing() -> list[tuple[str, datetime]]:
    """Region and begin of each layout change in the disruption ledger."""
    entries = Disruption.objects.filter(closed_at__isnull=True).exclude(machine=None)
    return list(entries.values_list("region_id", "opened_at"))


def _machines(
    cells: Collection[CellView], regions: Mapping[str, RegionView], written: WrittenTables
) -> tuple[MachineView, ...]:
    """Machines that may be divided for cells without nodes. Nothing is loaded without such a cell."""
    pools = {name for name, region in regions.items() if region.free is not None}
    kinds = {cell.instance_type for cell in cells if cell.state in WITHOUT_MACHINES and cell.region in pools}
    if not kinds:
        return ()
    return machine_views(kinds, written.get("shapes", ["models_registry_instancetype"], instance_shapes))


def spares_by_plan(now: datetime) -> dict[tuple[str, str], PlannedSpares]:
    """Machines that the day plan keeps warm now, by region and type, as the reconciler sees them. A constant number of
    queries; three if there is no plan or no autoscaler acts."""
    planned = planned_place_cells()
    if not planned:
        return {}
    fleet = FleetView(_regions(list(Region.objects.all())), {}, {}, deployment_views(), None, planned=planned)
    staying = Cell.objects.exclude(state__in=[state.value for state in LEAVING])
    found = planned_spares(fleet, Counter(staying.values_list("deployment_id", "region_id", "instance_type_id")), now)
    return {pool: spares for pool, spares in found.items() if fleet.regions[pool[0]].free is None}


def deployment_views() -> dict[str, DeploymentView]:
    """Every deployment with its targets by name, without its rollouts and the versions of its cells. Three queries."""
    return {view.name: view for view in _deployments(WrittenTables(()), {}, [], {}, dict)}


def quota_views() -> tuple[QuotaView, ...]:
    return tuple(
        QuotaView(row.team, row.instance_type_id, row.machines, row.borrow_most, row.region_id or "")
        for row in Quota.objects.all()
    )


def _notices() -> Iterator[NoticeView]:
    """Unsettled cloud notices, for each node of their machines."""
    rows = CloudNotice.objects.filter(settled_at=None, machine__role=MachineRole.NODE.value)
    shared = ArrayAgg("machine__slots__runs", filter=Q(machine__slots__runs__gt=""), default=Value([]))
    columns = ("machine__runs", "shared", "kind", "at", "ends_at", "text")
    for whole, others, kind, at, ends_at, text in rows.annotate(shared=shared).order_by("pk").values_list(*columns):
        for node in filter(None, (whole, *others)):
            yield NoticeView(node, NoticeKind(kind), at, ends_at, text)


def _regions(rows: list[Region]) -> dict[str, RegionView]:
    pools = {row.name for row in rows if row.provider == POOLED}
    if any(row.provider == LOCAL for row in rows):
        pools |= divided_regions()
    free = free_machines() if pools else {}
    return {row.name: _region(row, free.get(row.name, {}) if row.name in pools else None) for row in rows}


def _region(region: Region, free: Mapping[str, int] | None) -> RegionView:
    stated = region.warm_spares()
    return RegionView(
        name=region.name,
        spares={kind: spares.warm for kind, spares in stated.items()},
        repair_only={kind: spares.repair_only for kind, spares in stated.items()},
        free=free,
        limits=provider_limits(region.provider),
    )


def _with_prices(
    regions: dict[str, RegionView], deployments: Iterable[DeploymentView], written: WrittenTables, now: datetime
) -> dict[str, RegionView]:
    """Prices of machines for deployments with several types. Nothing is loaded without any."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for spec in deployments:
        for region in spec.cells_wanted if spec.further else ():
            kinds[region].update(spec.instance_types)
    if not kinds:
        return regions
    prices = written.get("prices", ("fleet_rate", "fleet_capacitypool", "models_registry_instancetype"), machine_prices)
    found = {
        region: {kind: usd for kind in there if (usd := prices.of(region, kind, now).usd) is not None}
        for region, there in kinds.items()
    }
    return {name: replace(view, prices=found.get(name, {})) for name, view in regions.items()}


def _rollouts(active: list[Rollout]) -> tuple[dict[str, RolloutView], dict[str, str]]:
    """By deployment: its rollout, or why it is unreadable."""
    views: dict[str, RolloutView] = {}
    unreadable: dict[str, str] = {}
    for rollout in active:
        try:
            views[rollout.deployment_id] = rollout_view(rollout)
        except InvalidPolicy as wrong:
            unreadable[rollout.deployment_id] = f"rollout {rollout.pk}: {wrong}"
    return views, unreadable


def deployment_view(name: str) -> DeploymentView:
    """One deployment for planners, with only its own version."""
    row = Deployment.objects.select_related("model_version").get(name=name)
    claims = {place.region_id: claim_of(place) for place in DeploymentRegion.objects.filter(deployment=row)}
    return _deployment(row, claims, {}, instance_shapes(row.instance_types), dict)


def _deployments(
    written: WrittenTables,
    versions: Mapping[str, dict[str, ModelVersion]],
    rollouts: list[Rollout],
    unreadable: dict[str, str],
    builds: Builds,
) -> Iterator[DeploymentView]:
    """`versions`: by deployment, the versions of its cells."""
    claims: dict[str, dict[str, ClaimView]] = defaultdict(dict)
    for place in written.get("places", ["fleet_deploymentregion"], lambda: list(DeploymentRegion.objects.all())):
        claims[place.deployment_id][place.region_id] = claim_of(place)
    goals: dict[str, dict[str, ModelVersion]] = defaultdict(dict)
    for rollout in rollouts:
        ends = (rollout.from_version, rollout.to_version)
        goals[rollout.deployment_id] = {version.reference: version for version in ends}
    shapes = written.get("shapes", ["models_registry_instancetype"], instance_shapes)
    for row in written.get("deployments", _OF_DEPLOYMENTS, _deployment_rows):
        view = _deployment(row, claims[row.name], versions.get(row.name, {}) | goals[row.name], shapes, builds)
        yield replace(view, problem=unreadable[row.name]) if row.name in unreadable else view


def _deployment_rows() -> list[Deployment]:
    return list(Deployment.objects.select_related("model_version"))


def claim_of(place: DeploymentRegion) -> ClaimView:
    """A deployment's target and grant in a region."""
    rule = GrantRule(place.grant_rule) if place.grant_rule else None
    return ClaimView(
        place.cells, place.cells_min, place.cells_granted, place.granted_at, rule, place.grant_reason,
        place.prefill, place.decode, place.by_type,
    )  # fmt: skip


def _deployment(
    row: Deployment,
    claims: dict[str, ClaimView],
    versions: dict[str, ModelVersion],
    shapes: Mapping[str, InstanceShape],
    builds: Builds,
) -> DeploymentView:
    """Invalid data become this deployment's problem and do not stop the planning of other deployments."""
    try:
        return _valid_deployment(row, claims, versions, shapes, builds)
    except (InvalidVersion, InvalidPolicy, InvalidMarkets) as wrong:
        return DeploymentView(
            name=row.name,
            instance_type=row.instance_types[0],
            nodes_per_cell=1,
            cells_wanted=_in_force(claims),
            drain_deadline_s=row.drain_deadline_s,
            version=row.model_version.reference,
            problem=str(wrong),
        )


def _in_force(claims: Mapping[str, ClaimView]) -> dict[str, int]:
    return {region: claim.in_force for region, claim in claims.items()}


def _valid_deployment(
    row: Deployment,
    claims: dict[str, ClaimView],
    versions: dict[str, ModelVersion],
    shapes: Mapping[str, InstanceShape],
    builds: Builds,
) -> DeploymentView:
    (first, *further), is_apart = row.instance_types, any(claim.prefill for claim in claims.values())
    shape, own_name = shapes[first], row.model_version.reference
    view = partial(version_view, is_apart=is_apart, builds=builds)
    own = view(row.model_version, shape)
    return DeploymentView(
        name=row.name,
        instance_type=first,
        nodes_per_cell=own.nodes_per_cell,
        cells_wanted=_in_force(claims),
        ready_timeout_s=own.ready_timeout_s,
        drain_deadline_s=row.drain_deadline_s,
        engine=own.engine,
        within=own.within,
        hands_over=own.hands_over,
        concurrency=own.concurrency,
        needs=own.needs,
        version=own_name,
        others={name: view(other, shape) for name, other in versions.items()},
        further={
            kind: {
                name: view(one, shapes[kind])
                for name, one in {**versions, own_name: row.model_version}.items()
                if name == own_name or kind in one.parallelism
            }
            for kind in further
        },
        policy=row.policy(),
        markets=parse_markets(row.markets),
        team=row.team,
        sharing=row.sharing(),
        claims=claims,
    )


def version_view(
    version: ModelVersion, machine: InstanceShape, *, is_apart: bool = False, builds: Builds = dict
) -> VersionView:
    """A version on these machines. `is_apart`: whether separate prefill and decode cells matter. Raises InvalidVersion
    if it does not cover this instance type, or is invalid."""
    spec = version.spec()
    there = spec.on(machine.name)
    build = builds().get(there.engine_build, "") if there.engine_build else ""
    return VersionView(
        nodes_per_cell(there, machine.name),
        there.ready_timeout_s,
        there.engine,
        network_nodes_shared(there, machine.name),
        hands_over=is_apart and not apart_objection(spec, machine),
        concurrency=there.max_concurrency,
        needs=frozenset({build, *(each.digest for each in artifacts_of(there))} - {""}),
    )
