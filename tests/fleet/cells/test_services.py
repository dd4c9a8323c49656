"""Decisions and operators' requests about cells on real PostgreSQL."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from fleet.cells import services as cell_actions
from fleet.cells.models import Cell, CellMember
from fleet.cells.services import (
    DRAINABLE,
    RESTARTABLE,
    cell_create,
    cell_drain,
    cell_explain,
    cell_mark_unrouted,
    cell_move,
    cell_restart,
    cell_start,
    cell_stop,
)
from fleet.faults.models import Incident
from fleet.nodes.models import Node
from fleet.reconcile.planning.decisions import CreateCell, ExplainCell, MoveCell, StartCell, StopCell
from fleet.reconcile.planning.states import CELL_ALLOWED, CellState, IncidentState, NodeState
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.models import Event
from kernel.refusals import Conflict
from kernel.transitions import StaleDecision, compare_and_set
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


def members(cell: str) -> list[str]:
    return list(CellMember.objects.filter(cell_id=cell).order_by("rank").values_list("node_id", flat=True))


def test_cells_get_numbers_that_are_never_used_twice() -> None:
    rows.deployment(cells=2)
    for _ in range(2):
        cell_create(CreateCell("sim-70b", "us-east-1", rows.KIND, "wanted"), now=NOW)
    Cell.objects.filter(id="sim-70b-us-east-1-2").delete()
    cell_create(CreateCell("sim-70b", "us-east-1", rows.KIND, "wanted"), now=NOW)
    assert set(Cell.objects.values_list("id", flat=True)) == {"sim-70b-us-east-1-1", "sim-70b-us-east-1-3"}


def test_what_a_cell_waits_for_is_said_on_it_and_in_the_timeline_and_changes_nothing_else() -> None:
    before = rows.cell("c1", state=CellState.PENDING, generation=0)
    cell_explain(ExplainCell("c1", CellState.PENDING, 0, "needs 2 local.cpu; 1 is spare"), now=NOW + HOUR)
    cell = Cell.objects.get(id="c1")
    assert (cell.state, cell.generation, cell.state_since) == ("pending", 0, before.state_since)
    assert cell.reason == "needs 2 local.cpu; 1 is spare"
    assert Event.objects.get(kind="cell.pending").message == "c1 is pending: needs 2 local.cpu; 1 is spare"


def test_an_explanation_of_what_a_cell_no_longer_is_is_dropped() -> None:
    rows.cell("c1", state=CellState.STARTING, generation=1)
    with pytest.raises(StaleDecision):
        cell_explain(ExplainCell("c1", CellState.PENDING, 0, "needs 2 local.cpu"), now=NOW)


def test_a_start_is_a_new_generation_with_a_new_secret_on_the_decided_nodes() -> None:
    rows.node("n-a"), rows.node("n-b")
    cell = rows.cell("c1", state=CellState.PENDING, generation=0)
    cell_start(StartCell("c1", CellState.PENDING, 0, ("n-a", "n-b"), "placed"), now=NOW)
    cell.refresh_from_db()
    assert (cell.state, cell.generation, len(cell.secret)) == ("starting", 1, 64)
    assert members("c1") == ["n-a", "n-b"]
    assert Node.objects.get(id="n-a").spare_since is None
    assert Event.objects.get(kind="cell.starting").detail == {"generation": 1}


def test_a_start_raises_the_desired_version_of_those_who_join_and_those_who_leave() -> None:
    old, stays, fresh = rows.node("n-old"), rows.node("n-stays"), rows.node("n-new")
    rows.cell("c1", old, stays, state=CellState.LOST)
    cell_start(StartCell("c1", CellState.LOST, 1, ("n-stays", "n-new"), "swap"), now=NOW)
    for node in (old, stays, fresh):
        node.refresh_from_db()
        assert node.desired_version == 2
    assert old.spare_since == NOW


@pytest.mark.parametrize(
    "stale",
    [
        MoveCell("c1", CellState.READY, 0, CellState.FAILED, "older generation"),
        MoveCell("c1", CellState.STARTING, 1, CellState.FAILED, "another state"),
    ],
)
def test_a_decision_that_saw_something_else_changes_nothing(stale: MoveCell) -> None:
    rows.cell("c1", rows.node("n-a"), state=CellState.READY, generation=1)
    with pytest.raises(StaleDecision):
        cell_move(stale, now=NOW)
    assert Cell.objects.get(id="c1").state == "ready"
    assert not Event.objects.exists()


def test_a_start_on_a_node_that_was_lost_meanwhile_is_stale_and_leaves_the_cell_whole() -> None:
    rows.cell("c1", rows.node("n-a"), state=CellState.FAILED)
    rows.node("n-b", state=NodeState.LOST)
    with pytest.raises(StaleDecision, match="n-b"):
        cell_start(StartCell("c1", CellState.FAILED, 1, ("n-a", "n-b"), "x"), now=NOW)
    assert members("c1") == ["n-a"]
    assert Cell.objects.get(id="c1").generation == 1


def test_a_change_of_state_that_is_not_allowed_is_refused() -> None:
    rows.cell("c1", state=CellState.PENDING, generation=0)
    with pytest.raises(ValueError, match="cannot go from pending to ready"):
        cell_move(MoveCell("c1", CellState.PENDING, 0, CellState.READY, "x"), now=NOW)


def test_a_failure_opens_one_incident_and_becoming_ready_closes_it() -> None:
    rows.cell("c1", rows.node("n-a"))
    cell_move(MoveCell("c1", CellState.READY, 1, CellState.FAILED, "engine killed"), now=NOW)
    incident = Incident.objects.get()
    assert (incident.kind, incident.state, incident.cell) == ("cell-failed", IncidentState.OPEN, "c1")
    cell_start(StartCell("c1", CellState.FAILED, 1, ("n-a",), "restart"), now=NOW)
    cell_move(MoveCell("c1", CellState.STARTING, 2, CellState.READY, "ready"), now=NOW)
    incident.refresh_from_db()
    assert (incident.state, incident.resolution) == (IncidentState.CLOSED, "ready again at generation 2")


def test_who_said_that_a_cell_failed_is_known_until_it_starts_again() -> None:
    rows.cell("c1", rows.node("n-a"))
    cell_move(MoveCell("c1", CellState.READY, 1, CellState.FAILED, "engine killed", failed_by="n-a"), now=NOW)
    assert fleet_view(now=NOW).cells["c1"].failed_by == "n-a"
    cell_start(StartCell("c1", CellState.FAILED, 1, ("n-a",), "restart"), now=NOW)
    assert fleet_view(now=NOW).cells["c1"].failed_by == ""


def test_becoming_ready_forgets_earlier_restarts() -> None:
    rows.cell("c1", rows.node("n-a"), state=CellState.STARTING, restarts=4)
    cell_move(MoveCell("c1", CellState.STARTING, 1, CellState.READY, "ready"), now=NOW)
    assert Cell.objects.get(id="c1").restarts == 0


def test_a_stopped_cell_gives_its_nodes_back() -> None:
    rows.cell("c1", rows.node("n-a", spare_since=None), state=CellState.DRAINING)
    cell_stop(StopCell("c1", CellState.DRAINING, 1, "drained"), now=NOW)
    assert members("c1") == []
    assert Node.objects.get(id="n-a").spare_since == NOW


def test_only_a_draining_cell_of_that_generation_is_marked_unrouted_and_only_once() -> None:
    rows.cell("c1", state=CellState.DRAINING, generation=2)
    assert not cell_mark_unrouted(cell_id="c1", generation=1, now=NOW)
    assert cell_mark_unrouted(cell_id="c1", generation=2, now=NOW)
    assert not cell_mark_unrouted(cell_id="c1", generation=2, now=NOW)


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
