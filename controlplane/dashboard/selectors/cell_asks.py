"""What may be asked of a cell in its present state, and what would follow: said before anybody asks."""

from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard.selectors.cells import CellRow
from fleet.models import Cell, Deployment
from fleet.planning.states import CellState
from fleet.selectors.history import deployment_subject, last_windows
from fleet.services.cell_actions import DRAINABLE, RESTARTABLE


@dataclass(frozen=True, slots=True)
class CellAsk:
    action: str
    label: str
    effect: str


@dataclass(frozen=True, slots=True)
class CellAsks:
    row: CellRow
    asks: tuple[CellAsk, ...]


def cell_asks(row: CellRow, now: datetime) -> CellAsks:
    """What its state allows, in three queries."""
    cell, state = row.cell, CellState(row.cell.state)
    others = _others(cell)
    left = f"{others} other ready cell{'s' if others != 1 else ''} of {cell.deployment_id} stay in {cell.region_id}"
    asks = []
    if state in DRAINABLE:
        asks.append(
            CellAsk("drain", "Drain", f"{_drained(row)} {left}{_spread(cell, others, now)}. A new cell makes up.")
        )
    if state in RESTARTABLE:
        cut = f"{row.load.in_flight} requests in flight are cut." if row.load else "Requests in flight are cut."
        what = f"{cut} {left}" if state is CellState.READY else "It starts at once, without the rest of its back-off"
        asks.append(CellAsk("restart", "Restart", f"{what}. The engine starts anew on the same nodes."))
    return CellAsks(row, tuple(asks))


def _others(cell: Cell) -> int:
    ready = Cell.objects.filter(deployment=cell.deployment_id, region=cell.region_id, state=CellState.READY.value)
    return ready.exclude(pk=cell.pk).count()


def _drained(row: CellRow) -> str:
    deadline_s = Deployment.objects.values_list("drain_deadline_s", flat=True).get(pk=row.cell.deployment_id)
    held = f"{row.load.in_flight} requests in flight have" if row.load else "Requests in flight have"
    return f"It gets no new requests; {held} {deadline_s:g} s to finish."


def _spread(cell: Cell, others: int, now: datetime) -> str:
    """What the others would have to carry, from the last window of the deployment in this region."""
    subject = deployment_subject(cell.deployment_id, cell.region_id)
    point = last_windows([subject], now).get(subject)
    if point is None or not others:
        return ""
    each = point.in_flight / others
    return f", with {each:.1f} requests in flight each instead of {point.in_flight / (others + 1):.1f}"
