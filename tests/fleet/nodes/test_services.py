"""Decisions about nodes on real PostgreSQL: rows, orders to providers, and consistency after a crash."""

from datetime import timedelta

import pytest

from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import agent_enrol, agents_identify, join_token_issue
from fleet.faults.models import Incident
from fleet.machines.services.provisioning import JOIN_TOKEN_TTL
from fleet.nodes.models import AgentCredential, JoinToken, Node, NodeReport
from fleet.nodes.services.nodes import agent_restart, node_move, node_retire, nodes_launch, nodes_move
from fleet.reconcile.planning.decisions import LaunchNodes, MoveNode, RestartAgent, RetireNode
from fleet.reconcile.planning.states import NodeState, ProviderAction
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.models import Event
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.cloud import FIRST_PORT, Cloud
from tests.fleet.provision import Clock, provision
from tests.fleet.rows import KIND, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("now", "cloud"), pytest.mark.slow]

LATER = NOW + timedelta(minutes=1)
RETIRE = RetireNode("n-a", NodeState.LOST, "it is lost and in no cell")


def launch(count: int = 1) -> None:
    rows.deployment()
    nodes_launch(LaunchNodes("us-east-1", KIND, count, "needed", there=Node.objects.count()), now=NOW)
    provision()


def test_a_node_that_joined_is_a_spare_from_then_on() -> None:
    node = rows.node("n-a", state=NodeState.JOINING, spare_since=None)
    node_move(MoveNode("n-a", NodeState.JOINING, NodeState.READY, "its agent joined"), now=LATER)
    node.refresh_from_db()
    assert (node.state, node.spare_since, node.state_since, node.desired_version) == ("ready", LATER, LATER, 2)
    assert Event.objects.get().kind == "node.ready"


def test_a_machine_is_launched_near_those_that_it_shall_join(cloud: Cloud) -> None:
    rows.deployment()
    nodes_launch(LaunchNodes("us-east-1", KIND, 2, "needed", there=0, near=("us-east-1", "rack-2")), now=NOW)
    provision()
    assert [spec.near for spec in cloud.launched] == [("us-east-1", "rack-2")] * 2


def test_a_loss_is_an_incident_that_names_the_cell() -> None:
    rows.cell("c1", rows.node("n-a"))
    node_move(MoveNode("n-a", NodeState.READY, NodeState.LOST, "gone", reported_at=NOW), now=LATER)
    incident = Incident.objects.get()
    assert (incident.kind, incident.cell, incident.deployment) == ("node-lost", "c1", "sim-70b")
    assert incident.evidence == {"reason": "gone", "last_report_at": NOW.isoformat()}


def test_a_decision_that_saw_another_state_changes_nothing() -> None:
    rows.node("n-a", state=NodeState.SUSPECT)
    with pytest.raises(StaleDecision, match="n-a"):
        node_move(MoveNode("n-a", NodeState.READY, NodeState.LOST, "gone"), now=NOW)
    assert not Event.objects.exists()
    assert not Incident.objects.exists()


def test_a_change_of_state_that_is_not_allowed_is_refused() -> None:
    rows.node("n-a", state=NodeState.LOST)
    with pytest.raises(ValueError, match="cannot go from lost to ready"):
        node_move(MoveNode("n-a", NodeState.LOST, NodeState.READY, "back"), now=NOW)


def test_launched_nodes_have_ports_places_and_tokens_of_their_own(cloud: Cloud) -> None:
    launch(5)
    made = Node.objects.order_by("port_base")
    assert [node.id for node in made] == [spec.id for spec in cloud.launched]
    assert [node.topology[1] for node in made] == ["rack-0"] * 4 + ["rack-1"]
    assert len({node.port_base for node in made}) == 5
    assert set(Node.objects.values_list("state", "reason")) == {("joining", "needed")}
    spec = cloud.launched[0]
    agent_enrol(token=spec.join_token, kind=AgentKind.NODE, subject=spec.id, nonce="5e" * 32, now=NOW)
    assert set(JoinToken.objects.values_list("expires_at", flat=True)) == {NOW + JOIN_TOKEN_TTL}


def test_who_saw_fewer_nodes_than_there_are_buys_none(cloud: Cloud) -> None:
    rows.deployment()
    rows.node("n-a")
    with pytest.raises(StaleDecision, match=r"us-east-1 has 1 nodes of local\.cpu, not 0"):
        nodes_launch(LaunchNodes("us-east-1", KIND, 2, "needed", there=0), now=NOW)
    provision()
    assert (cloud.launched, Node.objects.count()) == ([], 1)


def test_a_machine_whose_ports_are_another_nodes_is_a_failed_launch(cloud: Cloud) -> None:
    rows.node("n-a", port_base=FIRST_PORT)
    launch()
    lost = Node.objects.get(state=NodeState.LOST.value)
    assert lost.reason == "its launch failed: another node has the ports 127.0.0.1:60000"


def test_a_launch_that_fails_is_a_lost_node_with_the_reason(cloud: Cloud) -> None:
    cloud.broken = True
    launch()
    assert Node.objects.values_list("state", "reason").get() == ("lost", "its launch failed: no capacity")


def test_a_retired_node_loses_its_credential_its_report_and_its_machine(cloud: Cloud, now: Clock) -> None:
    rows.node("n-a", state=NodeState.LOST)
    token = join_token_issue(kind=AgentKind.NODE, subject="n-a", region="us-east-1", expires_at=LATER)
    credential = agent_enrol(token=token, kind="node", subject="n-a", nonce="5e" * 32, now=NOW)
    Incident.objects.create(kind="node-lost", subject="n-a", node="n-a", summary="s", opened_at=NOW)
    node_retire(RETIRE, now=LATER)
    assert Node.objects.values_list("state", "terminated_at").get() == ("retired", None)
    now.now = LATER
    provision()
    assert Node.objects.values_list("state", "terminated_at").get() == ("retired", LATER)
    assert cloud.terminated == ["n-a"]
    assert agents_identify([credential])[0] is None
    assert AgentCredential.objects.get().revoked_at == LATER
    assert not NodeReport.objects.exists()
    assert Incident.objects.get().resolution == "replaced and retired"


def test_a_member_of_a_cell_is_not_retired(cloud: Cloud) -> None:
    rows.cell("c1", rows.node("n-a", state=NodeState.LOST))
    with pytest.raises(StaleDecision, match="n-a joined a cell"):
        node_retire(RETIRE, now=NOW)
    provision()
    assert cloud.terminated == []


def test_a_machine_that_outlived_its_retirement_is_ended_by_a_later_attempt(cloud: Cloud, now: Clock) -> None:
    rows.node("n-a", state=NodeState.LOST)
    cloud.broken = True
    node_retire(RETIRE, now=NOW)
    provision()
    left = fleet_view(now=NOW).nodes["n-a"]
    assert (left.state, left.ordered) == (NodeState.RETIRED, ProviderAction.TERMINATE)
    with pytest.raises(StaleDecision, match="terminate of n-a is ordered already"):
        node_retire(RetireNode("n-a", left.state, "its machine may still run"), now=LATER)
    cloud.broken = False
    now.now = LATER
    provision()
    assert cloud.terminated == ["n-a"]
    assert fleet_view(now=LATER).nodes == {}
    assert Event.objects.filter(kind="node.retired").count() == 1


def test_a_dead_agent_is_started_again_and_the_timeline_says_so(cloud: Cloud) -> None:
    rows.node("n-a")
    agent_restart(RestartAgent("n-a", "its agent process is dead, the machine runs"), now=NOW)
    provision()
    assert cloud.restarted == ["n-a"]
    assert Event.objects.get().kind == "node.agent_restarted"


def test_an_agent_that_cannot_be_started_leaves_no_event_that_says_it_was(cloud: Cloud) -> None:
    rows.node("n-a")
    cloud.broken = True
    agent_restart(RestartAgent("n-a", "dead"), now=NOW)
    provision()
    assert not Event.objects.exists()


def test_of_many_moves_one_that_is_stale_costs_only_itself() -> None:
    for name, state in (("n-a", NodeState.SUSPECT), ("n-b", NodeState.LOST), ("n-c", NodeState.JOINING)):
        rows.node(name, state=state, spare_since=None)
    moves = [
        MoveNode("n-a", NodeState.SUSPECT, NodeState.READY, "its reports came back"),
        MoveNode("n-b", NodeState.SUSPECT, NodeState.READY, "its reports came back"),
        MoveNode("n-c", NodeState.JOINING, NodeState.READY, "its agent joined"),
        MoveNode("n-gone", NodeState.SUSPECT, NodeState.READY, "its reports came back"),
    ]
    assert nodes_move(moves, now=LATER) == [moves[0], moves[2]]
    found = {node.id: (node.state, node.reason, node.spare_since, node.desired_version) for node in Node.objects.all()}
    assert found == {
        "n-a": ("ready", "its reports came back", None, 2),
        "n-b": ("lost", "", None, 1),
        "n-c": ("ready", "its agent joined", LATER, 2),
    }
    messages = ["n-a is ready: its reports came back", "n-c is ready: its agent joined"]
    assert sorted(Event.objects.values_list("message", flat=True)) == messages
