"""Deep checks, alone and together, and the desired states of nodes."""

from collections.abc import Callable
from typing import Any

import pytest

from engine_agent.protocol.messages import CheckRequest
from engine_agent.protocol.states import MemberRole, Phase
from fleet.nodes.models import Node
from fleet.nodes.selectors import DesiredVersions, desired_for
from fleet.nodes.services.events import desired_changed
from fleet.nodes.services.nodes import MAX_CHECKED_TOGETHER, node_checks_request, node_cordon, node_uncordon
from fleet.reconcile.planning.states import CellState
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_cordoning_is_recorded_and_rings_the_reconciler(django_capture_on_commit_callbacks: Callable[..., Any]) -> None:
    rows.node("n-00000001")
    with django_capture_on_commit_callbacks() as callbacks:
        assert node_cordon(node_id="n-00000001", actor="ada", now=NOW)
    assert Node.objects.get().cordoned
    assert Event.objects.get().tone == "warn"
    assert callbacks


@pytest.mark.parametrize(("service", "cordoned"), [(node_cordon, True), (node_uncordon, False)])
def test_repeating_it_changes_and_records_nothing(
    service: Callable[..., bool], cordoned: bool, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    rows.node("n-00000001", cordoned=cordoned)
    with django_capture_on_commit_callbacks() as callbacks:
        assert not service(node_id="n-00000001", actor="ada", now=NOW)
    assert not Event.objects.exists()
    assert not callbacks


def test_what_runs_on_a_cordoned_node_is_left_alone() -> None:
    node = rows.node("n-00000001")
    rows.cell("c", node)
    node_cordon(node_id=node.id, actor="ada", now=NOW)
    after = Node.objects.get()
    assert (after.state, after.desired_version, after.member.cell_id) == ("ready", node.desired_version, "c")


def test_a_retired_node_cannot_be_cordoned() -> None:
    rows.node("n-00000001", state="retired")
    with pytest.raises(Conflict, match="n-00000001 is retired"):
        node_cordon(node_id="n-00000001", actor="ada", now=NOW)


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
    assert (
        Event.objects.get(kind="node.check_requested").message == "n-1 is being checked, requested by ada: it was slow"
    )
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
    node_checks_request(node_id="n-1", actor="ada", now=NOW)  # a serving node checks memory and disk
    refused: list[tuple[type[Exception], str, list[str]]] = [
        (Conflict, "n-1 is in cell c, whose engine uses the ports", ["n-1"]),
        (Conflict, "n-4 is retired", ["n-4"]),
        (InvalidInput, "there is no node 'n-9'", ["n-9"]),
        (InvalidInput, "a node is named twice", ["n-3"]),
        (InvalidInput, "at most 32 are checked", [f"n-x{number}" for number in range(MAX_CHECKED_TOGETHER)]),
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


def test_a_spare_is_told_to_run_nothing() -> None:
    rows.node("n-a")
    assert desired_for(["n-a"])["n-a"].assignment is None


def test_members_share_generation_secret_and_peers_and_differ_in_rank() -> None:
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"), generation=4, secret="s")
    sent = desired_for(["n-a", "n-b"])
    leader, follower = sent["n-a"].assignment, sent["n-b"].assignment
    assert leader is not None
    assert follower is not None
    assert (leader.rank, leader.role) == (0, MemberRole.LEADER)
    assert (follower.rank, follower.role) == (1, MemberRole.FOLLOWER)
    assert leader.generation == follower.generation == 4
    assert leader.secret == follower.secret == "s"
    assert leader.peers == follower.peers
    assert [peer.node for peer in leader.peers] == ["n-a", "n-b"]


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (CellState.STARTING, Phase.SERVE),
        (CellState.READY, Phase.SERVE),
        (CellState.DRAINING, Phase.DRAIN),
        (CellState.FAILED, Phase.STOP),
        (CellState.LOST, Phase.STOP),
    ],
)
def test_the_phase_follows_from_the_state_of_the_cell(state: CellState, phase: Phase) -> None:
    rows.cell("c1", rows.node("n-a"), state=state)
    assignment = desired_for(["n-a"])["n-a"].assignment
    assert assignment is not None
    assert assignment.phase is phase


def test_a_change_raises_the_version() -> None:
    rows.node("n-a")
    desired_changed(["n-a", "n-a"])
    versions = DesiredVersions()
    assert versions.newer([("n-a", 1), ("n-gone", 1)]) == ["n-a"]
    assert versions.newer([("n-a", 2)]) == []


def test_the_desired_state_of_many_nodes_takes_few_queries(django_assert_num_queries: Any) -> None:
    for index in range(5):
        rows.cell(f"c{index}", rows.node(f"n-{index}a"), rows.node(f"n-{index}b"))
    with django_assert_num_queries(7):
        assert len(desired_for([f"n-{i}{x}" for i in range(5) for x in "ab"])) == 10


def test_a_version_that_cannot_be_rendered_keeps_no_other_node_waiting(caplog: pytest.LogCaptureFixture) -> None:
    broken, spare = rows.node("n-00000001"), rows.node("n-00000002")
    rows.cell("c1", broken)
    ModelVersion.objects.update(engine="abacus")
    assert set(desired_for([broken.id, spare.id])) == {spare.id}
    assert "cannot render the desired state of node n-00000001: sim-70b@1: engine is 'abacus'" in caplog.text
