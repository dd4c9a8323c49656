"""The page of a node carries its actions: what each would do, who may, and what it did."""

import pytest
from django.test import Client

from fleet.cells.models import Cell
from fleet.faults.models import Incident, Repair, Replacement
from fleet.machines.models import ProviderCall
from fleet.nodes.models import Node, NodeCheck
from kernel.models import Event
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
CPU = {"kind": "cpu", "devices": [0], "cpus": [0], "memory_bytes": 2**30}


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.cell("c1", rows.node("n-l"), rows.node("n-f"))
    rows.node("n-s", accelerators=["nvidia 0: H100"])


def page(node: str) -> str:
    return fragment(signed_in(), f"/nodes/{node}/", "node")


def act(node: str, action: str, **form: str) -> int:
    return int(signed_in().post(f"/nodes/{node}/ask/{action}/", form).status_code)


def form(node: str, action: str) -> str:
    return " ".join(signed_in().get(f"/nodes/{node}/ask/{action}/").text.split())


def test_each_action_says_first_what_it_does() -> None:
    assert "its cell c1 is drained. It gets no new requests." in form("n-f", "drain")
    assert "It is in no cell." in form("n-s", "drain")
    assert "Its cell c1 is drained when the disruption ledger allows" in form("n-f", "replace")
    assert "only its memory and disk are checked" in form("n-f", "check")
    assert "Its cell c1 is lost" in form("n-f", "revoke")


def test_a_node_is_cordoned_drained_and_replaced_from_its_page() -> None:
    assert act("n-s", "cordon", why="noisy fan") == 302
    assert "It is cordoned already." in page("n-s")
    assert act("n-s", "uncordon") == 302
    assert act("n-f", "drain") == 302
    assert Cell.objects.get().state == "draining"
    assert act("n-f", "replace", confirm="n-l") == 409
    assert act("n-f", "replace", confirm="n-f", why="old") == 302
    assert Replacement.objects.get().reason == "replacement requested by operator: old"
    assert "It is being replaced already." in page("n-f")


def test_deep_checks_name_other_spares_and_a_mistake_keeps_them() -> None:
    refused = signed_in().post("/nodes/n-s/ask/check/", {"with_nodes": "n-x", "why": "links"})
    assert (refused.status_code, 'value="n-x"' in refused.text) == (409, True)
    assert act("n-s", "check") == 302
    assert NodeCheck.objects.get().node_id == "n-s"


def test_a_spare_is_reset_and_rebooted_and_one_in_a_cell_is_not() -> None:
    assert "Node n-f is in cell c1; drain it first." in page("n-f")
    assert act("n-f", "reboot") == 409
    assert act("n-s", "reset", why="after a driver update") == 302
    node = Node.objects.get(id="n-s")
    assert (node.state, NodeCheck.objects.get().reset) == ("faulty", [])
    assert Repair.objects.get().reason == "requested by operator: after a driver update"
    assert Event.objects.get(kind="node.repair").actor == "operator"
    assert "Node n-s is under repair already." in page("n-s")
    rows.node("n-t")
    assert "Node n-t has no accelerator to reset." in page("n-t")
    assert act("n-t", "reboot") == 302
    assert ProviderCall.objects.get().action == "reboot"


def test_a_machine_of_several_nodes_or_without_power_control_is_not_rebooted() -> None:
    rows.region("pool", provider="machines")
    rows.node("n-p", where="pool")
    assert "cannot be rebooted: its provider has no power control" in page("n-p")
    slots = ({"number": 0, "runs": "n-s"}, {"number": 1, "runs": "n-l"})
    machine = rows.machine("m-1", layout="2x1")
    for slot in slots:
        machine.slots.create(state="taken", owns=CPU, **slot)
    assert "Node n-s shares its machine with n-l." in page("n-s")
    assert act("n-s", "reset") == 409


def test_viewers_see_why_they_may_not() -> None:
    client = Client()
    client.force_login(make_user("viewer"))
    text = fragment(client, "/nodes/n-s/", "node")
    assert "Read-only. It needs the operator role." in text
    assert "/ask/" not in text
    assert client.post("/nodes/n-s/ask/cordon/").status_code == 403
    assert not Node.objects.get(id="n-s").cordoned


def test_an_incident_offers_the_actions_on_its_node() -> None:
    incident = Incident.objects.create(kind="node-slow", subject="n-f", node="n-f", summary="slow", opened_at=NOW)
    text = fragment(signed_in(), f"/incidents/{incident.pk}/", "incident")
    assert 'href="/nodes/n-f/ask/replace/">Replace node</a>' in text
    assert signed_in().post(f"/incidents/{incident.pk}/ask/dismiss/", {"why": "known"}).status_code == 302
    incident.refresh_from_db()
    assert incident.state == "closed"
