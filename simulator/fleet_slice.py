"""The part of a fleet that a what-if simulates; the rest is healthy, would not change, and would only cost time. A part
is left out only if no planner would act on it and it takes nothing from the change in question. Its contribution to the
budgets of region and fleet is kept."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from engine_agent.protocol.states import EngineState
from fleet.reconcile.planning.settings import LedgerLimits
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView
from fleet.reconcile.planning.states import CellState, NodeState


def without_other_deployments(fleet: FleetView, deployment: str) -> FleetView:
    """Returns the fleet without the deployments at rest, and without their machines. `deployment` stays, and so do
    deployments that share scarce machines with it."""
    cells = _cells_by_deployment(fleet)
    resting = {
        name
        for name, spec in fleet.deployments.items()
        if name != deployment
        and not _share_machines(fleet, fleet.deployments.get(deployment), spec)
        and _is_at_rest(fleet, spec, cells.get(name, ()))
    }
    gone = {member.node for name in resting for cell in cells.get(name, ()) for member in cell.members}
    return replace(
        fleet,
        deployments={name: spec for name, spec in fleet.deployments.items() if name not in resting},
        cells={cell.id: cell for cell in fleet.cells.values() if cell.deployment not in resting},
        nodes={node.id: node for node in fleet.nodes.values() if node.id not in gone},
    )


def _share_machines(fleet: FleetView, one: DeploymentView | None, other: DeploymentView) -> bool:
    """Whether cells of one may have to make room for the other's: in a region with a fixed pool of machines, or under
    quotas of the same type."""
    both_on = set(one.instance_types) & set(other.instance_types) if one is not None else set()
    if one is None or not both_on:
        return False
    for kind in both_on:
        if {one.team, other.team} <= {quota.team for quota in fleet.quotas if quota.instance_type == kind}:
            return True
    both = set(one.cells_wanted) & set(other.cells_wanted)
    return any(fleet.regions[region].free is not None for region in both if region in fleet.regions)


def without_other_regions(fleet: FleetView, region: str) -> FleetView:
    """Returns the fleet of one region, or the whole fleet while a rollout is active, because then regions wait for each
    other."""
    if fleet.rollouts:
        return fleet
    here = (spec for spec in fleet.deployments.values() if region in spec.cells_wanted)
    only = {
        spec.name: replace(spec, cells_wanted={region: spec.cells_wanted[region]}, claims={region: spec.claim(region)})
        for spec in here
    }
    return replace(
        fleet,
        regions={name: view for name, view in fleet.regions.items() if name == region},
        deployments=only,
        cells={cell.id: cell for cell in fleet.cells.values() if cell.region == region},
        nodes={node.id: node for node in fleet.nodes.values() if node.region == region},
    )


def limits_as_floors(fleet: FleetView, limits: LedgerLimits) -> LedgerLimits:
    """Converts the budgets of the whole fleet to floors, so that a part of it keeps them. Of several regions the
    tightest."""
    wanted: Counter[str] = Counter()
    for spec in fleet.deployments.values():
        wanted.update(spec.cells_wanted)
    regions = [limits.region(count) for count in wanted.values()]
    return replace(
        limits,
        region_floor=min(regions, default=limits.region_floor),
        fleet_floor=limits.fleet(wanted.total()),
    )


def _cells_by_deployment(fleet: FleetView) -> Mapping[str, list[CellView]]:
    cells: dict[str, list[CellView]] = {}
    for cell in fleet.cells.values():
        cells.setdefault(cell.deployment, []).append(cell)
    return cells


def _is_at_rest(fleet: FleetView, spec: DeploymentView, cells: Collection[CellView]) -> bool:
    """Whether it has all wanted cells, all of them healthy, and no rollout or operator moves it."""
    there = Counter(cell.region for cell in cells)
    wanted = {region: count for region, count in spec.cells_wanted.items() if count}
    if spec.name in fleet.rollouts or dict(there) != wanted:
        return False
    return all(_serves(fleet, cell, spec) for cell in cells)


def _serves(fleet: FleetView, cell: CellView, spec: DeploymentView) -> bool:
    if cell.state is not CellState.READY or cell.disruption is not None or cell.version != spec.version:
        return False
    nodes = [fleet.nodes[member.node] for member in cell.members]
    return all(
        node.state is NodeState.READY
        and not node.cordoned
        and node.report.connected
        and node.report.state is EngineState.READY
        and node.report.unhealthy_since is None
        for node in nodes
    )
