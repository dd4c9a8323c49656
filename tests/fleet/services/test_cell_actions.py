"""What people may ask of one cell."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from fleet.models import Cell, Incident, Node
from fleet.planning.states import CELL_ALLOWED, CellState
from fleet.services import cell_actions
from fleet.services.cell_actions import DRAINABLE, RESTARTABLE, cell_drain, cell_restart
from kernel.models import Event
from kernel.refusals import Conflict
from kernel.transitions import compare_and_set
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(minutes=1)


def test_every_change_that_they_make_is_an_allowed_one() -> None:
    assert all(CellState.DRAINING in CELL_ALLOWED[state] for state in DRAINABLE)
    assert all(CellState.FAILED in CELL_ALLOWED[state] for state in RESTARTABLE - {CellState.FAILED})


def test_draining_is_told_to_the_nodes_and_recorded(django_capture_on_commit_callbacks: Callable[..., Any]) -> None:
    node = rows.node("n-00000001")
    rows.cell("c", node, unrouted_at=None)
    with django_capture_on_commit_callbacks() as callbacks:
        cell_drain(cell_id="c", actor="ada", now=LATER, why="new disk")
    cell = Cell.objects.get()
    assert (cell.state, cell.state_since, cell.reason) == ("draining", LATER, "drain requested by ada: new disk")
    assert Node.objects.get().desired_version == node.desired_version + 1
    event = Event.objects.get()
    assert (event.kind, event.actor, event.cell) == ("cell.draining", "ada", "c")
    assert event.detail == {"action": "drain", "was": "ready", "generation": 1}
    assert callbacks


@pytest.mark.parametrize("state", sorted(set(CellState) - DRAINABLE))
def test_only_a_ready_cell_can_be_drained(state: str) -> None:
    rows.cell("c", state=state)
    with pytest.raises(Conflict, match=f"c is {state}; drain needs a cell that is ready"):
        cell_drain(cell_id="c", actor="ada", now=LATER)


@pytest.mark.parametrize("state", sorted(set(CellState) - RESTARTABLE))
def test_only_a_ready_or_failed_cell_can_be_restarted(state: str) -> None:
    rows.cell("c", state=state)
    with pytest.raises(Conflict, match=f"c is {state}; restart needs a cell that is failed or ready"):
        cell_restart(cell_id="c", actor="ada", now=LATER)


def test_restarting_a_ready_cell_fails_it_without_an_incident() -> None:
    rows.cell("c", rows.node("n-00000001"))
    cell_restart(cell_id="c", actor="ada", now=LATER)
    cell = Cell.objects.get()
    assert (cell.state, cell.state_since, cell.reason) == ("failed", LATER, "restart requested by ada")
    assert not Incident.objects.exists()


def test_restarting_a_failed_cell_ends_its_wait() -> None:
    rows.cell("c", state="failed", restarts=6)
    cell_restart(cell_id="c", actor="ada", now=LATER)
    cell = Cell.objects.get()
    assert (cell.state, cell.state_since, cell.restarts) == ("failed", NOW, 0)


def test_a_cell_that_changed_meanwhile_is_a_conflict_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.cell("c", rows.node("n-00000001"))

    def after_somebody_else(seen: "QuerySet[Cell]", **arguments: Any) -> bool:
        Cell.objects.update(generation=2)
        return compare_and_set(seen, **arguments)

    monkeypatch.setattr(cell_actions, "compare_and_set", after_somebody_else)
    with pytest.raises(Conflict, match="c changed"):
        cell_drain(cell_id="c", actor="ada", now=LATER)
    assert Cell.objects.get().state == "ready"
    assert not Event.objects.exists()
