"""Decisions about faulty nodes on real rows: all or nothing, and never on a node that has come back."""

from datetime import timedelta

import pytest

from fleet.faults.models import Repair, Replacement
from fleet.faults.planning.views import Rule
from fleet.faults.services.incidents import (
    node_cordon_faulty,
    node_replace,
    node_uncordon_called_off,
    replacement_close,
    replacement_schedule,
)
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.services.nodes import node_cordon, node_move
from fleet.reconcile.planning.decisions import (
    CloseReplacement,
    CordonNode,
    MoveNode,
    ReplaceNode,
    RequestReplacement,
    UncordonNode,
)
from fleet.reconcile.planning.states import NodeState
from kernel.models import Event
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=30)
REPLACE = ReplaceNode("n-f", NodeState.READY, NOW, "c1", Rule.HARD_SIGNATURE, "it broke")


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.cell("c1", rows.node("n-l"), rows.node("n-f"))
    rows.node("n-s")


def node(name: str = "n-f") -> Node:
    return Node.objects.get(id=name)


def test_a_replaced_node_is_faulty_and_cordoned_and_its_replacement_and_repair_are_on_record() -> None:
    node_replace(REPLACE, now=LATER)
    assert (node().state, node().cordoned, node().reason) == ("faulty", True, "it broke")
    work = Replacement.objects.get()
    assert (work.node_id, work.cell, work.rule, work.begun_at, work.closed_at) == (
        "n-f",
        "c1",
        "hard_signature",
        LATER,
        None,
    )
    assert Repair.objects.get().what == "replacement"
    assert Event.objects.get().kind == "node.faulty"


def test_a_node_that_left_its_state_and_came_back_is_left_alone() -> None:
    Node.objects.filter(id="n-f").update(state_since=NOW + timedelta(seconds=5))
    with pytest.raises(StaleDecision):
        node_replace(REPLACE, now=LATER)
    assert node().state == NodeState.READY
    assert not Replacement.objects.exists()


def test_a_node_that_is_in_another_cell_meanwhile_is_left_alone() -> None:
    with pytest.raises(StaleDecision, match="another cell"):
        node_replace(ReplaceNode("n-f", NodeState.READY, NOW, "c9", Rule.SLOW, "slow"), now=LATER)
    assert node().state == NodeState.READY


def test_a_node_that_spoke_after_the_snapshot_is_not_lost() -> None:
    Node.objects.filter(id="n-f").update(state=NodeState.SUSPECT)
    NodeReport.objects.filter(node_id="n-f").update(last_seen_at=LATER)
    with pytest.raises(StaleDecision, match="has reported since"):
        node_move(MoveNode("n-f", NodeState.SUSPECT, NodeState.LOST, "silent", reported_at=NOW), now=LATER)
    assert node().state == NodeState.SUSPECT


def test_a_lost_member_is_being_replaced() -> None:
    Node.objects.filter(id="n-f").update(state=NodeState.SUSPECT)
    node_move(MoveNode("n-f", NodeState.SUSPECT, NodeState.LOST, "silent", reported_at=NOW), now=LATER)
    assert Replacement.objects.get().rule == Rule.SILENCE


def test_a_wish_begins_when_the_node_goes_out_of_use() -> None:
    replacement_schedule(RequestReplacement("n-f", "c1", Rule.SLOW, "slow"), now=NOW)
    assert Replacement.objects.get().begun_at is None
    node_replace(REPLACE, now=LATER)
    assert Replacement.objects.get().begun_at == LATER


def test_a_node_is_wished_away_once() -> None:
    replacement_schedule(RequestReplacement("n-f", "c1", Rule.SLOW, "slow"), now=NOW)
    with pytest.raises(StaleDecision):
        replacement_schedule(RequestReplacement("n-f", "c1", Rule.SLOW, "slow"), now=LATER)


def test_a_replacement_closes_once() -> None:
    node_replace(REPLACE, now=NOW)
    done = CloseReplacement(Replacement.objects.get().pk, "c1 is ready without it")
    replacement_close(done, now=LATER)
    assert Replacement.objects.get().closed_at == LATER
    with pytest.raises(StaleDecision):
        replacement_close(done, now=LATER)


def test_cordoning_a_cordoned_node_is_stale() -> None:
    node_cordon_faulty(CordonNode("n-s", "it broke"), now=NOW)
    assert node("n-s").cordoned
    with pytest.raises(StaleDecision):
        node_cordon_faulty(CordonNode("n-s", "it broke"), now=NOW)


def test_all_machines_of_a_cell_that_their_provider_takes_away_are_replaced_and_cost_no_others_budget() -> None:
    rows.cell("c2", rows.node("n-x"))
    for name in ("n-l", "n-f"):
        node_replace(ReplaceNode(name, NodeState.READY, NOW, "c1", Rule.NOTICE, "it ends"), now=LATER)
    replacement_schedule(RequestReplacement("n-x", "c2", Rule.SLOW, "slow"), now=LATER)
    assert Replacement.objects.filter(closed_at=None).count() == 3


def test_a_node_is_let_back_only_by_what_cordoned_it() -> None:
    back = UncordonNode("n-s", "called off")
    node_cordon_faulty(CordonNode("n-s", "it ends", for_notice=True), now=NOW)
    node_uncordon_called_off(back, now=NOW)
    assert not node("n-s").cordoned
    node_cordon_faulty(CordonNode("n-s", "it ends", for_notice=True), now=NOW)
    node_cordon(node_id="n-s", actor="ann", now=NOW)
    with pytest.raises(StaleDecision):
        node_uncordon_called_off(back, now=NOW)
    assert node("n-s").cordoned
