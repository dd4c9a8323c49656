"""What operators do with one cell: drain it, or restart it. Each is one compare-and-set with its event.

The reconciler does the rest: it makes up for a draining cell, stops it once idle, and starts a failed one again.
"""

from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import Cell, CellMember
from fleet.planning.states import CELL_TONE, CellState, DisruptionCause
from fleet.services.cell import ROUTING_TASK
from fleet.services.desired import desired_changed, pairs_changed
from fleet.services.ledger import disruption_open
from kernel import live, wake_ups
from kernel.refusals import Conflict
from kernel.transitions import compare_and_set

DRAINABLE = frozenset({CellState.READY})
RESTARTABLE = frozenset({CellState.READY, CellState.FAILED})


def cell_drain(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Take a ready cell out of service: no new requests, those in flight finish or meet the deployment's deadline.

    Raises:
        Conflict: the cell is not ready, or changed while this was decided.
    """
    _act(cell_id, "drain", DRAINABLE, CellState.DRAINING, actor, why, now)


def cell_restart(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Fail a cell on purpose, so that it starts again as a whole with a new generation. Requests in flight are cut.

    A cell that failed already starts again without the rest of its back-off.

    Raises:
        Conflict: the cell is neither ready nor failed, or changed while this was decided.
    """
    _act(cell_id, "restart", RESTARTABLE, CellState.FAILED, actor, why, now, restarts=0)


def _act(
    cell_id: str,
    action: str,
    from_states: frozenset[CellState],
    to: CellState,
    actor: str,
    why: str,
    now: datetime,
    **changes: Any,
) -> None:
    cell = Cell.objects.get(id=cell_id)
    seen = CellState(cell.state)
    if seen not in from_states:
        allowed = " or ".join(sorted(from_states))
        raise Conflict(f"cell {cell.id} is {seen}; {action} needs a cell that is {allowed}")
    reason = f"{action} requested by {actor}" + (f": {why}" if why else "")
    if seen is not to:
        changes["state_since"] = now
    rows = Cell.objects.filter(id=cell.id, state=seen.value, generation=cell.generation)
    with transaction.atomic():
        event = _event(cell, action, to, reason, actor)
        if not compare_and_set(rows, event=event, now=now, state=to.value, reason=reason, **changes):
            raise Conflict(f"cell {cell.id} changed while {action} was decided; check it and try again")
        if seen is CellState.READY:
            disruption_open(cell=cell, cause=DisruptionCause.OPERATOR, reason=reason, now=now)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        pairs_changed(cell)
        live.push("cells", cell.id)
        wake_ups.send("fleet.reconcile")
        wake_ups.send(ROUTING_TASK)


def _event(cell: Cell, action: str, to: CellState, reason: str, actor: str) -> dict[str, Any]:
    return {
        "kind": f"cell.{to}",
        "message": f"{cell.id} is {to}: {reason}",
        "tone": CELL_TONE[to],
        "actor": actor,
        "region": cell.region_id,
        "deployment": cell.deployment_id,
        "cell": cell.id,
        "detail": {"action": action, "was": cell.state, "generation": cell.generation},
    }
