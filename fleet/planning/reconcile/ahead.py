"""What a cell that serves will ask for once the machines of it that end are gone. Decides nothing."""

from fleet.planning.notices import Notices
from fleet.planning.placement.planner import PlacementRequest
from fleet.planning.snapshot import CellView, FleetView


def order_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """The request that the cell will make, as a repair beside the nodes that stay; None: nothing of it leaves."""
    leaving = {member.node for member in cell.members if notices.leaving(member.node)}
    if not leaving:
        return None
    spec = fleet.deployments[cell.deployment]
    version = spec.of(cell.version)
    return PlacementRequest(
        cell=cell.id,
        deployment=cell.deployment,
        region=cell.region,
        instance_type=spec.instance_type,
        count=len(leaving),
        staying=tuple(fleet.nodes[member.node] for member in cell.members if member.node not in leaving),
        within=version.within,
        engine=version.engine,
        is_repair=True,
        markets=spec.markets,
    )
