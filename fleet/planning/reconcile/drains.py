"""Decides whether a cell that drains may be taken: it takes nothing new and has nothing left, or its time is over."""

from datetime import datetime

from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView


def drain_ended(cell: CellView, fleet: FleetView, settings: FleetSettings, now: datetime) -> str:
    """Why the drain of this draining cell is over; empty while it is not."""
    deadline_s = fleet.deployments[cell.deployment].drain_deadline_s
    in_flight = last_in_flight(cell, fleet, settings)
    if in_flight == 0:
        return "drained: unrouted and idle"
    if fleet.listening_for_s(cell.state_since, now) > deadline_s:
        left = "an unknown number of" if in_flight is None else in_flight
        return f"drain deadline of {deadline_s:.0f} s passed with {left} requests in flight"
    return ""


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
