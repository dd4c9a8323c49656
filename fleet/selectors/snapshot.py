"""Loads the fleet as planners take it, in a constant number of queries."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from django.db.models import Q, QuerySet

from engine_agent.protocol.fingerprint import fingerprint_digest
from engine_agent.protocol.states import EngineState
from fleet.models import (
    Cell,
    CellMember,
    Deployment,
    DeploymentRegion,
    Disruption,
    MachineStatus,
    Node,
    NodeReport,
    ProviderCall,
    Region,
    Rollout,
)
from fleet.planning.faults.liveness import status_in_force
from fleet.planning.policy import InvalidPolicy
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    MemberView,
    NodeView,
    ProviderStatus,
    RegionView,
    ReportView,
    RolloutView,
    VersionView,
)
from fleet.planning.states import CellState, DisruptionCause, NodeState, ProviderAction
from fleet.selectors.faults import faults_view
from fleet.selectors.rollout import active_rollouts, counters_reported, rollout_view
from kernel.leases import lease_held_since
from models_registry.models import ModelVersion
from models_registry.planning.engine_arguments import network_nodes_shared, nodes_per_cell
from models_registry.planning.version_spec import InvalidVersion

LISTENING_LEASE = "agent-ingest"
"""Held by the processes that agents are connected to; while it is not held, silence means nothing."""


def fleet_view(*, now: datetime, settings: FleetSettings | None = None) -> FleetView:
    """The whole fleet, with how providers described the nodes in doubt, as far as `settings` lets that count."""
    chosen = settings or FleetSettings()
    # A member is never left out: planners look up every node that a cell names. Nor is a machine that may still run.
    done = Q(state=NodeState.RETIRED, member__isnull=True, terminated_at__isnull=False)
    nodes = {node.id: node for node in _nodes(done)}
    cells = list(Cell.objects.exclude(state=CellState.STOPPED).select_related("model_version"))
    active = active_rollouts()
    rollouts, unreadable = _rollouts(active)
    return FleetView(
        regions={region.name: _region(region) for region in Region.objects.all()},
        nodes={node.id: node_view(node, chosen, now) for node in nodes.values()},
        cells={cell.id: cell for cell in _cells(cells, nodes, set(rollouts))},
        deployments={view.name: view for view in _deployments(cells, active, unreadable)},
        listening_since=lease_held_since(name=LISTENING_LEASE, now=now),
        rollouts=rollouts,
        faults=faults_view(now=now),
    )


def _region(region: Region) -> RegionView:
    stated = region.warm_spares()
    return RegionView(
        name=region.name,
        spares={kind: spares.warm for kind, spares in stated.items()},
        repair_only={kind: spares.repair_only for kind, spares in stated.items()},
    )


def _nodes(done: Q) -> "QuerySet[Node]":
    return Node.objects.exclude(done).select_related("report", "machine_status", "provider_call")


def node_view(node: Node, settings: FleetSettings, now: datetime) -> NodeView:
    """One node, with its report, its machine's status and its provider's order loaded."""
    stored: NodeReport | None = getattr(node, "report", None)
    report = report_view(stored) if stored else ReportView(connected=False, last_seen_at=None)
    machine: MachineStatus | None = getattr(node, "machine_status", None)
    order: ProviderCall | None = getattr(node, "provider_call", None)
    provider = ProviderStatus.UNKNOWN
    if machine is not None:
        provider = status_in_force(ProviderStatus(machine.status), machine.described_at, report, settings, now)
    return NodeView(
        id=node.id,
        region=node.region_id,
        instance_type=node.instance_type_id,
        state=NodeState(node.state),
        created_at=node.created_at,
        state_since=node.state_since,
        report=report,
        cordoned=node.cordoned,
        topology=tuple(node.topology),
        spare_since=node.spare_since,
        provider=provider,
        ordered=ProviderAction(order.action) if order else None,
        fingerprint=fingerprint_digest(node.fingerprint) if node.fingerprint else "",
        software=node.fingerprint,
    )


def report_view(report: NodeReport) -> ReportView:
    return ReportView(
        connected=report.connected,
        last_seen_at=report.last_seen_at,
        connection_changed_at=report.connection_changed_at,
        state=EngineState(report.state),
        cell=report.cell,
        generation=report.generation,
        reason=report.reason,
        unhealthy_since=report.unhealthy_since,
        health_reason=(report.health or {}).get("reason", ""),
        in_flight=(report.load or {}).get("in_flight", 0),
    )


def _cells(cells: list[Cell], nodes: dict[str, Node], counted: set[str]) -> Iterator[CellView]:
    """`counted`: the deployments whose gates need what their cells have counted."""
    members: dict[str, list[MemberView]] = defaultdict(list)
    for member in CellMember.objects.order_by("rank"):
        members[member.cell_id].append(MemberView(member.node_id, member.rank))
    disruptions = dict(Disruption.objects.filter(closed_at__isnull=True).values_list("cell_id", "cause"))
    for cell in cells:
        view = CellView(
            id=cell.id,
            deployment=cell.deployment_id,
            region=cell.region_id,
            state=CellState(cell.state),
            generation=cell.generation,
            created_at=cell.created_at,
            state_since=cell.state_since,
            members=tuple(members[cell.id]),
            restarts=cell.restarts,
            unrouted_at=cell.unrouted_at,
            reason=cell.reason,
            version=cell.model_version.reference,
            disruption=DisruptionCause(disruptions[cell.id]) if cell.id in disruptions else None,
        )
        yield _with_counters(view, nodes) if cell.deployment_id in counted else view


def _with_counters(cell: CellView, nodes: dict[str, Node]) -> CellView:
    leader = nodes[cell.members[0].node] if cell.members else None
    counters = counters_reported(getattr(leader, "report", None))
    if counters is None or leader is None or (leader.report.cell, counters.generation) != (cell.id, cell.generation):
        return cell
    return replace(cell, counters=counters)


def _rollouts(active: list[Rollout]) -> tuple[dict[str, RolloutView], dict[str, str]]:
    """By deployment: its rollout, or why that cannot be read."""
    views: dict[str, RolloutView] = {}
    unreadable: dict[str, str] = {}
    for rollout in active:
        try:
            views[rollout.deployment_id] = rollout_view(rollout)
        except InvalidPolicy as wrong:
            unreadable[rollout.deployment_id] = f"rollout {rollout.pk}: {wrong}"
    return views, unreadable


def deployment_view(name: str) -> DeploymentView:
    """One deployment as planners take it, with no other version than its own."""
    row = Deployment.objects.select_related("model_version").get(name=name)
    wanted = dict(DeploymentRegion.objects.filter(deployment=row).values_list("region_id", "cells"))
    return _deployment(row, wanted, {})


def _deployments(cells: list[Cell], rollouts: list[Rollout], unreadable: dict[str, str]) -> Iterator[DeploymentView]:
    wanted: dict[str, dict[str, int]] = defaultdict(dict)
    for place in DeploymentRegion.objects.all():
        wanted[place.deployment_id][place.region_id] = place.cells
    versions: dict[str, dict[str, ModelVersion]] = defaultdict(dict)
    for name, version in (
        *((cell.deployment_id, cell.model_version) for cell in cells),
        *((rollout.deployment_id, rollout.from_version) for rollout in rollouts),
        *((rollout.deployment_id, rollout.to_version) for rollout in rollouts),
    ):
        versions[name][version.reference] = version
    for row in Deployment.objects.select_related("model_version"):
        view = _deployment(row, wanted[row.name], versions[row.name])
        yield replace(view, problem=unreadable[row.name]) if row.name in unreadable else view


def _deployment(row: Deployment, wanted: dict[str, int], versions: dict[str, ModelVersion]) -> DeploymentView:
    """Something in it that makes no sense is its problem alone, and must not stop the planning of others."""
    try:
        return _valid_deployment(row, wanted, versions)
    except (InvalidVersion, InvalidPolicy) as wrong:
        return DeploymentView(
            name=row.name,
            instance_type=row.instance_type_id,
            nodes_per_cell=1,
            cells_wanted=wanted,
            drain_deadline_s=row.drain_deadline_s,
            version=row.model_version.reference,
            problem=str(wrong),
        )


def _valid_deployment(row: Deployment, wanted: dict[str, int], versions: dict[str, ModelVersion]) -> DeploymentView:
    own = version_view(row.model_version, row.instance_type_id)
    return DeploymentView(
        name=row.name,
        instance_type=row.instance_type_id,
        nodes_per_cell=own.nodes_per_cell,
        cells_wanted=wanted,
        ready_timeout_s=own.ready_timeout_s,
        drain_deadline_s=row.drain_deadline_s,
        engine=own.engine,
        within=own.within,
        version=row.model_version.reference,
        others={name: version_view(other, row.instance_type_id) for name, other in versions.items()},
        policy=row.policy(),
    )


def version_view(version: ModelVersion, instance_type: str) -> VersionView:
    """A version as it runs on these machines.

    Raises:
        InvalidVersion: it does not state this instance type, or is invalid.
    """
    spec = version.spec()
    within = network_nodes_shared(spec, instance_type)
    return VersionView(nodes_per_cell(spec, instance_type), version.ready_timeout_s, version.engine, within)
