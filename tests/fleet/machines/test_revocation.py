"""A revoked node is rejected by every host, and its cell gets another node."""

from datetime import timedelta
from pathlib import Path

import pytest

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind
from fleet.agents.models import IssuedCertificate
from fleet.agents.services.authority import CertificateOrder, certificate_issue
from fleet.agents.services.enrolment import EnrolmentRefused, agents_identify, credential_issue, join_token_issue
from fleet.agents.services.enrolment import agent_enrol as enrol
from fleet.cells.models import Cell
from fleet.clouds.machines import MachinesProvider
from fleet.faults.models import Replacement
from fleet.machines.models import Machine
from fleet.machines.selectors import free_machines, pool_of
from fleet.machines.services.reports import machine_hellos_store
from fleet.machines.services.revocation import machine_revoke, node_revoke
from fleet.nodes.models import AgentCredential, Node
from fleet.reconcile.planning.states import CellState, MachineRole, MachineState, NodeState
from fleet.reconcile.services import reconcile
from kernel.models import Event
from kernel.refusals import Conflict
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def enrolled(node: str, home: Path) -> str:
    token = join_token_issue(kind=AgentKind.NODE, subject=node, region="us-east-1", expires_at=NOW + timedelta(hours=1))
    credential = enrol(token=token, kind="node", subject=node, nonce="5e" * 32, now=NOW)
    order = CertificateOrder(IdentityKind.NODE, node, Identity(home).signing_request())
    certificate_issue(order, now=NOW)
    return credential


def test_a_revoked_nodes_credential_and_certificate_count_no_more_and_it_is_faulty(tmp_path: Path) -> None:
    rows.node("n-a")
    credential = enrolled("n-a", tmp_path)
    node_revoke(node_id="n-a", actor="ada", now=NOW, why="stolen")
    assert agents_identify([credential]) == [None]
    assert AgentCredential.objects.filter(revoked_at__isnull=True).count() == 0
    assert IssuedCertificate.objects.get().revoked_at == NOW
    node = Node.objects.get()
    assert (node.state, node.cordoned, node.reason) == (NodeState.FAULTY, True, "revoked by ada: stolen")
    assert Replacement.objects.get().begun_at == NOW
    assert Event.objects.get(kind="node.revoked").actor == "ada"


def test_its_cell_is_lost_at_once(tmp_path: Path) -> None:
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"))
    enrolled("n-a", tmp_path)
    node_revoke(node_id="n-a", actor="ada", now=NOW)
    reconcile()
    assert CellState(Cell.objects.get(id="c1").state) is not CellState.READY


def test_a_retired_node_has_nothing_left_to_revoke() -> None:
    rows.node("n-a", state=NodeState.RETIRED.value)
    with pytest.raises(Conflict, match="n-a is retired; its credential and certificates were revoked then"):
        node_revoke(node_id="n-a", actor="ada", now=NOW)


def test_who_revokes_a_node_once_more_says_nothing_unless_something_counts_again() -> None:
    node = rows.node("n-00000001")
    for minute in range(3):
        node_revoke(node_id=node.id, actor="ada", now=NOW + timedelta(minutes=minute))
    assert [*Event.objects.values_list("kind", flat=True)] == ["node.revoked"]
    assert Node.objects.get().state_since == NOW
    late = credential_issue(kind="node", subject=node.id, region="us-east-1", now=NOW)
    node_revoke(node_id=node.id, actor="ada", now=NOW)
    assert agents_identify([late]) == [None]
    assert Event.objects.filter(kind="node.revoked").count() == 2


def test_the_host_of_a_revoked_node_enrols_nothing_and_is_never_free_again() -> None:
    node = rows.node("n-00000001", where="pool")
    machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=node.id)
    credential = credential_issue(kind="machine", subject=machine.id, region="pool", now=NOW)
    node_revoke(node_id=node.id, actor="ada", now=NOW, why="stolen")
    assert agents_identify([credential]) == [None]
    shown = credential_issue(kind="machine", subject=machine.id, region="pool", now=NOW)  # a missed one
    with pytest.raises(EnrolmentRefused, match="m-00000001 has no order to run node n-00000001"):
        enrol(token=shown, kind="node", subject=node.id, nonce="5e" * 32, now=NOW)
    hello = Hello(1, AgentKind.MACHINE, machine.id, "b0", "0.1.0", machine=rows.FACTS)
    refused = machine_hellos_store([hello], now=NOW)
    assert str(refused[machine.id]) == "m-00000001 was revoked; uninstall it and join it with a new token"
    MachinesProvider().terminate(node.id)
    machine.refresh_from_db()
    assert (machine.state, machine.runs, machine.reason) == (MachineState.GONE, "", "revoked by ada: stolen")
    assert Event.objects.filter(kind__in=["node.revoked", "machine.revoked"]).count() == 2


def test_a_free_machine_that_is_revoked_is_gone_at_once() -> None:
    machine = rows.machine("m-00000001")
    machine_revoke(machine_id=machine.id, actor="ada", now=NOW)
    machine.refresh_from_db()
    assert (machine.state, machine.revoked_at) == (MachineState.GONE, NOW)
    assert pool_of("pool", MachineRole.NODE) == []
    assert free_machines() == {}


@pytest.mark.parametrize("provider", ["machines", "local"])
def test_who_revokes_a_machine_once_more_changes_nothing_unless_something_counts_again(provider: str) -> None:
    node = rows.node("n-00000001", where="pool")
    machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=node.id, provider=provider)
    credential_issue(kind="node", subject=node.id, region="pool", now=NOW)
    for minute in range(3):
        machine_revoke(machine_id=machine.id, actor="ada", now=NOW + timedelta(minutes=minute))
    assert sorted(Event.objects.values_list("kind", flat=True)) == ["machine.revoked", "node.revoked"]
    assert Node.objects.get().state_since == NOW
    late = credential_issue(kind="node", subject=node.id, region="pool", now=NOW)
    machine_revoke(machine_id=machine.id, actor="ada", now=NOW)
    assert agents_identify([late]) == [None]
    assert Event.objects.filter(kind="machine.revoked").count() == 2


def test_a_termination_that_waits_for_a_machine_ends_when_it_is_revoked() -> None:
    rows.machine("m-00000001", state=MachineState.WIPING.value, runs="n-00000001")
    machine_revoke(machine_id="m-00000001", actor="ada", now=NOW)
    MachinesProvider().terminate("n-00000001")
    assert Machine.objects.get().state == MachineState.GONE
