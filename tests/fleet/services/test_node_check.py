"""Nodes are told to make their deep checks, alone or together, and what they found is on the way up."""

import pytest

from engine_agent.protocol.messages import CheckRequest
from fleet.models import Node
from fleet.selectors.node import desired_for
from fleet.services.node_actions import TOGETHER_MOST, node_checks_request
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def request_of(node: str) -> CheckRequest:
    found = desired_for([node])[node].check
    assert found is not None
    return found


def test_a_request_is_part_of_what_a_node_should_do() -> None:
    rows.node("n-1")
    before = Node.objects.get(id="n-1").desired_version
    assert desired_for(["n-1"])["n-1"].check is None
    assert node_checks_request(node_id="n-1", actor="ada", now=NOW, why="it was slow") == ["n-1"]
    first = request_of("n-1")
    assert (first.peers, first.secret) == ((), "")
    assert Node.objects.get(id="n-1").desired_version == before + 1
    assert Event.objects.get(kind="node.check_requested").message == "n-1 is checked, requested by ada: it was slow"
    node_checks_request(node_id="n-1", actor="ada", now=NOW)
    assert request_of("n-1").id != first.id


def test_nodes_that_are_checked_together_know_each_other_and_one_secret() -> None:
    for number in range(3):
        rows.node(f"n-{number}")
    node_checks_request(node_id="n-1", actor="ada", now=NOW, with_nodes=["n-0", "n-2"])
    first, second = request_of("n-1"), request_of("n-2")
    assert [peer.node for peer in first.peers] == ["n-1", "n-0", "n-2"]
    assert (first.rank, second.rank) == (0, 2)
    assert first.id == second.id
    assert first.secret == second.secret != ""
    assert first.peers[1].port_base == Node.objects.get(id="n-0").port_base


def test_what_cannot_be_checked_is_refused_by_name() -> None:
    rows.cell("c", rows.node("n-1"), rows.node("n-2"))
    rows.node("n-3")
    rows.node("n-4", state="retired")
    node_checks_request(node_id="n-1", actor="ada", now=NOW)  # one that serves: memory and disk
    refused: list[tuple[type[Exception], str, list[str]]] = [
        (Conflict, "n-1 is in cell c, whose engine has the ports", ["n-1"]),
        (Conflict, "n-4 is retired", ["n-4"]),
        (InvalidInput, "there is no node 'n-9'", ["n-9"]),
        (InvalidInput, "a node is named twice", ["n-3"]),
        (InvalidInput, "at most 32 are checked", [f"n-x{number}" for number in range(TOGETHER_MOST)]),
    ]
    for kind, message, others in refused:
        with pytest.raises(kind, match=message):
            node_checks_request(node_id="n-3", actor="ada", now=NOW, with_nodes=others)
    assert desired_for(["n-3"])["n-3"].check is None


def test_a_peer_that_is_gone_leaves_the_others_without_a_check_of_links() -> None:
    rows.node("n-1")
    gone = rows.node("n-2")
    node_checks_request(node_id="n-1", actor="ada", now=NOW, with_nodes=["n-2"])
    gone.delete()
    assert request_of("n-1").peers == ()
