"""Loads the fleet as planners take it, in a constant number of queries."""

from collections import defaultdict
from datetime import datetime

from django.db.models import Q

from controlplane.kernel.leases import lease_held_since
from engine_agent.protocol.fingerprint import fingerprint_digest
from engine_agent.protocol.states import EngineState
from fleet.models import Cell, CellMember, Deployment, DeploymentRegion, Node, NodeReport, Region
from fleet.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    MemberView,
    NodeView,
    ProviderStatus,
    RegionView,
    ReportView,
)
from fleet.planning.states import CellState, NodeState
from models_registry.planning.engine_arguments import nodes_per_cell

LISTENING_LEASE = "agent-ingest"
"""Held by the process that agents talk to; while nobody holds it, silence means nothing."""


def fleet_view(*, now: datetime, provider: dict[str, ProviderStatus] | None = None) -> FleetView:
    """The whole fleet. `provider` adds what providers said of the nodes in doubt."""
    asked = provider or {}
    # A member is never left out: planners look up every node that a cell names. Nor is a machine that may still run.
    done = Q(state=NodeState.RETIRED, member__isnull=True, terminated_at__isnull=False)
    nodes = Node.objects.exclude(done).select_related("report")
    return FleetView(
        regions={region.name: RegionView(region.name, region.spares) for region in Region.objects.all()},
        nodes={node.id: node_view(node, asked.get(node.id, ProviderStatus.UNKNOWN)) for node in nodes},
        cells={cell.id: cell for cell in _cells()},
        deployments={view.name: view for view in _deployments()},
        listening_since=lease_held_since(name=LISTENING_LEASE, now=now),
    )


def node_view(node: Node, provider: ProviderStatus) -> NodeView:
    report = getattr(node, "report", None)
    return NodeView(
        id=node.id,
        region=node.region_id,
        instance_type=node.instance_type_id,
        state=NodeState(node.state),
        created_at=node.created_at,
        state_since=node.state_since,
        report=report_view(report) if report else ReportView(connected=False, last_seen_at=None),
        cordoned=node.cordoned,
        topology=tuple(node.topology),
        spare_since=node.spare_since,
        provider=provider,
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


def _cells() -> list[CellView]:
    members: dict[str, list[MemberView]] = defaultdict(list)
    for member in CellMember.objects.order_by("rank"):
        members[member.cell_id].append(MemberView(member.node_id, member.rank))
    return [
        CellView(
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
        )
        for cell in Cell.objects.exclude(state=CellState.STOPPED)
    ]


def _deployments() -> list[DeploymentView]:
    wanted: dict[str, dict[str, int]] = defaultdict(dict)
    for row in DeploymentRegion.objects.all():
        wanted[row.deployment_id][row.region_id] = row.cells
    return [
        DeploymentView(
            name=deployment.name,
            instance_type=deployment.instance_type_id,
            nodes_per_cell=nodes_per_cell(deployment.model_version.spec(), deployment.instance_type_id),
            cells_wanted=wanted[deployment.name],
            ready_timeout_s=deployment.model_version.ready_timeout_s,
            drain_deadline_s=deployment.drain_deadline_s,
            engine=deployment.model_version.engine,
        )
        for deployment in Deployment.objects.select_related("model_version")
    ]
