"""Decides whether a cell that drains may be taken: it takes nothing new and has nothing left, or its time is over."""

from datetime import timedelta

from fleet.planning.notices import Notices
from fleet.planning.placement.spares import is_idle
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView


def drain_ended(cell: CellView, notices: Notices) -> str:
    """Why the drain of this draining cell is over; empty while it is not. A machine that its provider ends may be used
    until then, unless another one waits for its place."""
    fleet, settings, now = notices.fleet, notices.settings, notices.now
    deadline_s = fleet.deployments[cell.deployment].drain_deadline_s
    in_flight = last_in_flight(cell, fleet, settings)
    if in_flight == 0:
        return "drained: unrouted and idle"
    left = "an unknown number of" if in_flight is None else in_flight
    ends_at = notices.end_of_cell(cell)
    if ends_at is not None and ends_at - now <= timedelta(seconds=settings.notices.last_s):
        return f"a machine of it ends at {ends_at:%H:%M:%S} UTC, with {left} requests in flight"
    if fleet.listening_for_s(cell.state_since, now) > deadline_s and (ends_at is None or _has_spare(cell, fleet)):
        return f"drain deadline of {deadline_s:.0f} s passed with {left} requests in flight"
    return ""


def _has_spare(cell: CellView, fleet: FleetView) -> bool:
    pool = (cell.region, cell.instance_type)
    nodes = (node for node in fleet.nodes.values() if (node.region, node.instance_type) == pool)
    return any(is_idle(node) and fleet.cell_of(node.id) is None for node in nodes)


def last_in_flight(cell: CellView, fleet: FleetView, settings: FleetSettings) -> int | None:
    """Requests in flight, measured since nothing new arrives; None: not known yet. What was measured before says
    nothing of a request that came in between."""
    if not cell.members:
        return 0
    report = fleet.nodes[cell.members[0].node].report
    if cell.unrouted_at is None or report.last_seen_at is None or not report.is_about(cell):
        return None
    age_s = (report.last_seen_at - cell.unrouted_at).total_seconds()
    return report.in_flight if age_s >= settings.load_age_s else None
