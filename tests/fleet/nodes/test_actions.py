"""Operators' requests about nodes: applied once, with actor and reason, and only in the right states."""

import pytest

from fleet.cells.models import Cell
from fleet.faults.models import Incident, Replacement, Signal
from fleet.faults.services.incidents import hardware_fault_record
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_drain, node_replacement_request, node_uncordon
from fleet.reconcile.planning.states import NodeState
from kernel.models import Event
from kernel.refusals import Conflict
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.cell("c1", rows.node("n-l"), rows.node("n-f"))
    rows.node("n-s")


def test_a_replacement_is_noted_with_who_asked_and_why_and_the_node_is_cordoned() -> None:
    node_replacement_request(node_id="n-f", actor="ann", why="noisy fan", now=NOW)
    work = Replacement.objects.get()
    assert (work.node_id, work.cell, work.rule, work.actor, work.begun_at) == ("n-f", "c1", "operator", "ann", None)
    assert Node.objects.get(id="n-f").cordoned
    assert Event.objects.filter(actor="ann").count() == 2
    with pytest.raises(Conflict, match="already"):
        node_replacement_request(node_id="n-f", actor="ann", now=NOW)


def test_a_node_that_is_out_of_use_is_not_replaced() -> None:
    rows.node("n-x", state=NodeState.LOST)
    with pytest.raises(Conflict, match="only one that is ready or suspect"):
        node_replacement_request(node_id="n-x", actor="ann", now=NOW)


def test_draining_a_node_cordons_it_and_drains_its_cell() -> None:
    node_drain(node_id="n-f", actor="ann", now=NOW)
    assert Node.objects.get(id="n-f").cordoned
    assert Cell.objects.get().state == "draining"
    node_drain(node_id="n-s", actor="ann", now=NOW)
    assert Node.objects.get(id="n-s").cordoned


def test_a_node_of_a_starting_cell_is_not_drained_and_not_cordoned() -> None:
    Cell.objects.update(state="starting")
    with pytest.raises(Conflict):
        node_drain(node_id="n-f", actor="ann", now=NOW)
    assert not Node.objects.get(id="n-f").cordoned


def test_uncordoning_vouches_for_a_faulty_node() -> None:
    node = rows.node("n-x", state=NodeState.FAULTY, cordoned=True)
    Node.objects.filter(id="n-x").update(state=NodeState.READY)
    hardware_fault_record(
        node=Node.objects.get(id="n-x"), cell="", signature="nvidia_xid", summary="", evidence={}, now=NOW
    )
    Node.objects.filter(id="n-x").update(state=NodeState.FAULTY)
    Incident.objects.create(kind="hardware-fault", subject="n-x", node="n-x", summary="s", opened_at=NOW)
    node_uncordon(node_id="n-x", actor="ann", why="new board", now=NOW)
    node.refresh_from_db()
    assert (node.state, node.cordoned, node.reason) == ("ready", False, "uncordoned by ann: new board")
    assert Signal.objects.get().settled_at == NOW
    assert Incident.objects.get().resolution == "uncordoned by ann: new board"


def test_a_faulty_node_still_in_its_cell_is_not_vouched_for() -> None:
    Node.objects.filter(id="n-f").update(state=NodeState.FAULTY, cordoned=True)
    with pytest.raises(Conflict, match="still in a cell"):
        node_uncordon(node_id="n-f", actor="ann", now=NOW)
    assert Node.objects.get(id="n-f").cordoned


def test_uncordoning_calls_off_a_replacement_that_has_not_begun() -> None:
    node_replacement_request(node_id="n-f", actor="ann", now=NOW)
    node_uncordon(node_id="n-f", actor="bob", now=NOW)
    assert Replacement.objects.get().resolution == "uncordoned by bob"
