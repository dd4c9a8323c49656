"""What nodes are told follows from the cells in the database, and from nothing else."""

from typing import Any

import pytest

from engine_agent.protocol.states import MemberRole, Phase
from fleet.planning.states import CellState
from fleet.selectors.node import desired_for, newer_versions
from fleet.services.desired import desired_changed
from models_registry.models import ModelVersion
from tests.fleet import rows

pytestmark = pytest.mark.django_db


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
    assert newer_versions({"n-a": 1, "n-gone": 1}) == {"n-a": 2}
    assert newer_versions({"n-a": 2}) == {}


def test_the_desired_state_of_many_nodes_takes_four_queries(django_assert_num_queries: Any) -> None:
    for index in range(5):
        rows.cell(f"c{index}", rows.node(f"n-{index}a"), rows.node(f"n-{index}b"))
    with django_assert_num_queries(4):
        assert len(desired_for([f"n-{i}{x}" for i in range(5) for x in "ab"])) == 10


def test_a_version_that_cannot_be_rendered_keeps_no_other_node_waiting(caplog: pytest.LogCaptureFixture) -> None:
    broken, spare = rows.node("n-00000001"), rows.node("n-00000002")
    rows.cell("c1", broken)
    ModelVersion.objects.update(engine="abacus")
    assert set(desired_for([broken.id, spare.id])) == {spare.id}
    assert "cannot render the desired state of node n-00000001: sim-70b@1: engine is 'abacus'" in caplog.text
