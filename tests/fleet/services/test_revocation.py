"""A node that is trusted no longer: refused everywhere, and its cell goes on elsewhere."""

from datetime import timedelta
from pathlib import Path

import pytest

from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.states import AgentKind
from engine_agent.runtime.identity import Identity
from fleet.models import AgentCredential, Cell, IssuedCertificate, Node, Replacement
from fleet.planning.states import CellState, NodeState
from fleet.services.certificate import CertificateOrder, certificate_issue
from fleet.services.enrolment import agent_enrol as enrol
from fleet.services.enrolment import agents_identify, join_token_issue
from fleet.services.reconcile import reconcile
from fleet.services.revocation import node_revoke
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
