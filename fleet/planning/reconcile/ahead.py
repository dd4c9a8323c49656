"""What a cell that serves will ask for because machines of it end. Decides nothing."""

from dataclasses import replace

from fleet.planning.notices import Notices
from fleet.planning.placement.planner import PlacementRequest
from fleet.planning.snapshot import CellView, FleetView


def order_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """The request that the cell will make, as a repair beside the nodes that stay; None: nothing of it leaves."""
    leaving = {member.node for member in cell.members if notices.leaving(member.node)}
    if not leaving:
        return None
    staying = tuple(fleet.nodes[member.node] for member in cell.members if member.node not in leaving)
    return replace(notices.order_whole(cell), count=len(leaving), staying=staying, is_repair=True)


def supply_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """What is bought for it meanwhile: machines for another whole cell, if it stands alone and there is time for one.
    They come singly and near those that stay, so that the cell is repaired with them if only some do."""
    order = order_ahead(cell, fleet, notices)
    if order is None or not notices.stands_alone(cell) or not _has_time(cell, fleet, notices):
        return order
    return replace(order, count=notices.order_whole(cell).count)


def _has_time(cell: CellView, fleet: FleetView, notices: Notices) -> bool:
    """Whether machines that are bought now serve in another cell before this one must drain."""
    end = notices.end_of_cell(cell)
    ready_s = fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s
    needed_s = fleet.regions[cell.region].limits.boot_s + ready_s + notices.drain_s(cell)
    return end is not None and (end - notices.now).total_seconds() > needed_s
