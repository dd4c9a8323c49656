"""One fault is one incident: the loss of a node and the failures of its cells, in any order, notified once."""

from datetime import datetime, timedelta

import pytest

from fleet.cells.services import cell_move, cell_start
from fleet.faults.models import Incident
from fleet.faults.planning.views import IncidentKind
from fleet.faults.services.incidents import incident_open_decided
from fleet.machines.models import Machine, MachineSlot
from fleet.nodes.services.nodes import node_move, node_retire
from fleet.reconcile.planning.decisions import MoveCell, MoveNode, OpenIncident, RetireNode, StartCell
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.webhooks.models import Webhook, WebhookDelivery
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("cloud"), pytest.mark.slow]

SOON, LATER = NOW + timedelta(seconds=2), NOW + timedelta(seconds=31)


@pytest.fixture(autouse=True)
def hook() -> None:
    Webhook.objects.create(name="pager", url="https://example.com/x", created_at=NOW)


def told() -> list[str]:
    return list(WebhookDelivery.objects.order_by("id").values_list("event", flat=True))


def lose_node(node: str, at: datetime = SOON) -> None:
    node_move(MoveNode(node, NodeState.READY, NodeState.LOST, "its machine is gone", reported_at=NOW), now=at)


def lose_cell(cell: str, to: CellState = CellState.LOST, at: datetime = SOON) -> None:
    cell_move(MoveCell(cell, CellState.READY, 1, to, "a member is lost"), now=at)


def heal(cell: str, node: str, spare: str) -> None:
    rows.node(spare)
    cell_start(StartCell(cell, CellState.LOST, 1, (spare,), f"{spare} takes the place of {node}"), now=LATER)
    node_retire(RetireNode(node, NodeState.LOST, "it is lost and in no cell"), now=LATER)


def ready(cell: str) -> None:
    cell_move(MoveCell(cell, CellState.STARTING, 2, CellState.READY, "every rank is ready"), now=LATER)


def test_the_loss_of_a_cell_joins_the_incident_of_its_node_until_both_have_recovered() -> None:
    rows.cell("c1", rows.node("n-a"))
    lose_node("n-a")
    lose_cell("c1")
    incident = Incident.objects.get()
    assert (incident.kind, incident.subject, incident.cell, incident.node) == ("node-lost", "n-a", "c1", "n-a")
    assert {(part.noun, part.name) for part in incident.parts.all()} == {("node", "n-a"), ("cell", "c1")}
    heal("c1", "n-a", "n-s")
    incident.refresh_from_db()
    assert incident.state == "open"
    ready("c1")
    incident.refresh_from_db()
    assert (incident.state, incident.resolution) == ("closed", "ready again at generation 2")
    assert told() == ["incident.opened", "incident.closed"]
    assert Event.objects.filter(kind="incident.joined", cell="c1").count() == 1
    story = fragment(signed_in(), f"/incidents/{incident.pk}/", "incident-story")
    assert all(phase in story for phase in ("Cause", "Detection", "Action", "Recovery"))


def test_a_node_that_is_retired_last_closes_it() -> None:
    rows.cell("c1", rows.node("n-a"))
    lose_node("n-a")
    lose_cell("c1")
    rows.node("n-s")
    cell_start(StartCell("c1", CellState.LOST, 1, ("n-s",), "n-s takes its place"), now=LATER)
    ready("c1")
    assert Incident.objects.get().state == "open"
    node_retire(RetireNode("n-a", NodeState.LOST, "it is lost and in no cell"), now=LATER)
    assert (Incident.objects.get().state, told()) == ("closed", ["incident.opened", "incident.closed"])


def test_a_cell_that_failed_first_becomes_the_incident_of_its_lost_node() -> None:
    rows.cell("c1", rows.node("n-a"))
    lose_cell("c1", CellState.FAILED, at=NOW)
    (first,) = Incident.objects.all()
    lose_node("n-a", at=LATER)
    incident = Incident.objects.get()
    assert (incident.pk, incident.kind, incident.subject, incident.opened_at) == (first.pk, "node-lost", "n-a", NOW)
    assert incident.evidence["first_seen_as"] == "Cell c1 failed: a member is lost"
    assert (told(), bearer().get("/api/v1/incidents?cell=c1").json()["results"][0]["id"]) == (
        ["incident.opened"],
        incident.pk,
    )


def test_a_failure_long_before_the_loss_is_another_fault() -> None:
    rows.cell("c1", rows.node("n-a"))
    lose_cell("c1", CellState.FAILED, at=NOW)
    lose_node("n-a", at=NOW + timedelta(seconds=181))
    assert set(Incident.objects.values_list("kind", flat=True)) == {"cell-failed", "node-lost"}


def test_several_cells_on_one_machine_are_one_incident() -> None:
    nodes = [rows.node(name) for name in ("n-a", "n-b")]
    for cell, node in zip(("c1", "c2"), nodes, strict=True):
        rows.cell(cell, node)
    machine = Machine.objects.create(
        id="m-00000001", provider="machines", region=nodes[0].region, state="taken", created_at=NOW, state_since=NOW
    )
    for number, node in enumerate(nodes):
        MachineSlot.objects.create(machine=machine, number=number, owns={}, runs=node.id)
    lose_cell("c1", CellState.FAILED, at=NOW)
    lose_cell("c2", CellState.FAILED, at=NOW)
    lose_node("n-a")
    lose_node("n-b")
    incident = Incident.objects.get(state="open")
    assert (incident.kind, incident.subject) == ("node-lost", "m-00000001")
    assert {part.name for part in incident.parts.all()} == {"n-a", "n-b", "c1", "c2"}
    assert Incident.objects.get(state="closed").resolution == f"part of incident {incident.pk}"
    found = bearer().get("/api/v1/incidents?node=n-b&state=open").json()["results"]
    assert [row["id"] for row in found] == [incident.pk]


def test_faulty_hardware_stays_open_until_its_cell_serves() -> None:
    rows.cell("c1", rows.node("n-a"))
    incident_open_decided(OpenIncident(IncidentKind.HARDWARE, "n-a", "XID 48", {}, node="n-a", cell="c1"), now=NOW)
    assert not fleet_view(now=NOW).faults.incidents[0].is_held
    lose_cell("c1", CellState.FAILED)
    assert Incident.objects.get().kind == "hardware-fault"
    assert fleet_view(now=SOON).faults.incidents[0].is_held


def test_a_shadow_incident_explains_nothing() -> None:
    rows.cell("c1", rows.node("n-a"))
    shadow = OpenIncident(IncidentKind.HARDWARE, "n-a", "XID 48", {}, node="n-a", cell="c1", shadow=True)
    incident_open_decided(shadow, now=NOW)
    lose_cell("c1", CellState.FAILED)
    assert Incident.objects.count() == 2
