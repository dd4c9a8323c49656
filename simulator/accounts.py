"""Counts what the rule of the disruption ledger asks for, row by row, as the services count it in PostgreSQL."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from fleet.planning.ledger import Standing
from fleet.planning.snapshot import CellView, DeploymentView
from fleet.planning.states import CellState, DisruptionCause


def standing_of(
    cells: Iterable[CellView],
    deployments: Mapping[str, DeploymentView],
    about: CellView,
    settle_s: float,
    now: datetime,
) -> Standing:
    """What one more disruption, of this cell, would start from. Cells count once ready for `settle_s`."""
    spec = deployments[about.deployment]
    available = available_here = own_open = region_open = fleet_open = 0
    for cell in cells:
        if cell.disruption is not None:
            own_open += cell.deployment == spec.name
            if cell.disruption is not DisruptionCause.SCALE:
                fleet_open += 1
                region_open += cell.region == about.region
        if cell.deployment == spec.name and _is_available(cell, settle_s, now):
            available += 1
            available_here += cell.region == about.region
    return Standing(
        wanted=sum(spec.cells_wanted.values()),
        available=available,
        open=own_open,
        wanted_here=spec.cells_wanted.get(about.region, 0),
        available_here=available_here,
        region_wanted=sum(other.cells_wanted.get(about.region, 0) for other in deployments.values()),
        region_open=region_open,
        fleet_wanted=sum(sum(other.cells_wanted.values()) for other in deployments.values()),
        fleet_open=fleet_open,
        is_available=_is_available(about, settle_s, now),
    )


def _is_available(cell: CellView, settle_s: float, now: datetime) -> bool:
    return cell.state is CellState.READY and (now - cell.state_since).total_seconds() >= settle_s
