"""Repairs on real rows: a reset and its checks, a reboot by the provider, and the return of a cured node."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest

from engine_agent.protocol.messages import CheckRequest
from fleet.cells.services import cell_move
from fleet.clouds.base import Later, ProviderError
from fleet.faults.models import Incident, Repair, Signal
from fleet.faults.planning.views import Attempt, IncidentKind, Rung
from fleet.faults.services.incidents import hardware_fault_record, incident_open_decided
from fleet.faults.services.repairs import repair_check, repair_end, repair_request, repair_try
from fleet.machines.models import ProviderCall
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.selectors import desired_for
from fleet.reconcile.planning.decisions import CheckRepair, EndRepair, MoveCell, OpenIncident, TryRepair
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.reconcile.services import reconcile
from kernel.models import Event
from kernel.transitions import StaleDecision
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.provision import Clock, provision
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("cloud", "now")]

LATER = NOW + timedelta(seconds=30)
GPU = ["nvidia 0: NVIDIA H100 80GB HBM3, 80 GiB"]
TRY = TryRepair("n-f", Rung.RESET, "nvidia_xid_fatal: XID 48", ("GPU-1",))
LADDER = ({"rung": "reset_device", "state": "running", "reason": "XID 48"},)


@pytest.fixture(autouse=True)
def faulty() -> Node:
    node = rows.node("n-f", state=NodeState.FAULTY.value, cordoned=True, accelerators=GPU)
    evidence = {"xid": 48, "device": 0, "uuid": "GPU-1"}
    hardware_fault_record(
        node=node, cell="", signature="nvidia_xid_fatal", summary="XID 48", evidence=evidence, now=NOW
    )
    return node


def node() -> Node:
    return Node.objects.get(id="n-f")


def order() -> CheckRequest | None:
    return desired_for(["n-f"])["n-f"].check


def report(checks: list[dict[str, Any]], *, request: str | None = None) -> None:
    """The node's agent reports the results of its deep checks."""
    ended = {"request": request or Repair.objects.latest("id").request, "began_at": 1.0, "ended_at": 2.0}
    NodeReport.objects.filter(node="n-f").update(telemetry={"checks": {**ended, "results": checks}})


def attempt() -> Attempt:
    return fleet_view(now=LATER).faults.attempts["n-f"][-1]


def test_a_reset_is_ordered_with_its_checks_and_only_once() -> None:
    version = node().desired_version
    repair_try(TRY, now=NOW)
    repair = Repair.objects.get()
    assert (repair.what, repair.reason, repair.ended_at) == ("reset_device", "nvidia_xid_fatal: XID 48", None)
    assert order() == CheckRequest(repair.request, reset=("GPU-1",))
    assert node().desired_version == version + 1
    assert Event.objects.latest("id").message == "Reset of the device of n-f: nvidia_xid_fatal: XID 48"
    with pytest.raises(StaleDecision, match="under repair already"):
        repair_try(TRY, now=NOW)
    assert (attempt().rung, attempt().checks) == (Rung.RESET, None)
    report([{"check": "memory", "ok": True, "found": "fine"}], request="another")
    assert attempt().checks is None
    report([{"check": "reset", "ok": True, "found": "reset nvidia 0"}])
    assert attempt().checks == (("reset", True, "reset nvidia 0"),)


def test_a_node_in_use_is_not_repaired() -> None:
    rows.cell("c1", rows.node("n-l"), node())
    with pytest.raises(StaleDecision, match="n-f is not out of use"):
        repair_try(TRY, now=NOW)
    Node.objects.filter(id="n-l").update(state=NodeState.READY.value)
    with pytest.raises(StaleDecision, match="n-l is not out of use"):
        repair_try(TryRepair("n-l", Rung.REBOOT, "r"), now=NOW)


def test_a_cured_node_is_a_spare_again_and_its_incident_closes_with_the_ladder() -> None:
    opened = OpenIncident(
        IncidentKind.HARDWARE, "n-f", "Node n-f: XID 48", {"ladder": [dict(LADDER[0])]}, node="n-f", region="us-east-1"
    )
    incident_open_decided(opened, now=NOW)
    repair_try(TRY, now=NOW)
    ended = EndRepair(Repair.objects.get().pk, "n-f", Rung.RESET, True, "2 deep checks passed", LADDER)
    repair_end(ended, now=LATER)
    row = node()
    assert (row.state, row.cordoned, row.spare_since) == ("ready", False, LATER)
    assert row.reason == "repaired by a reset of its device: 2 deep checks passed"
    assert not Signal.objects.filter(settled_at=None).exists()
    incident = Incident.objects.get()
    assert (incident.state, incident.resolution) == ("closed", row.reason)
    assert incident.evidence["ladder"] == [{"rung": "reset_device", "state": "cured", "reason": "2 deep checks passed"}]
    page = signed_in().get(f"/incidents/{incident.pk}/").text
    assert all(text in page for text in ("Ladder", "reset_device", "cured", "2 deep checks passed"))
    shown = bearer().get(f"/api/v1/incidents/{incident.pk}/").json()
    assert shown["evidence"]["ladder"][0]["state"] == "cured"
    with pytest.raises(StaleDecision):
        repair_end(ended, now=LATER)


def test_a_cured_device_returns_all_nodes_that_use_it_and_closes_their_incident() -> None:
    other = rows.node("n-g", state=NodeState.FAULTY.value, cordoned=True)
    evidence = {"device": "GPU-1", "nodes": ["n-f", "n-g"], "ladder": [dict(LADDER[0])]}
    about = OpenIncident(IncidentKind.HARDWARE, "GPU-1 of m-0000000a", "Device GPU-1: XID 48", evidence)
    incident_open_decided(about, now=NOW)
    repair_try(TRY, now=NOW)
    ended = EndRepair(Repair.objects.get().pk, "n-f", Rung.RESET, True, "2 deep checks passed", LADDER, ("n-g",))
    other.state = NodeState.LOST.value
    other.save()
    with pytest.raises(StaleDecision, match="n-g is not out of use"):
        repair_end(ended, now=LATER)
    other.state = NodeState.FAULTY.value
    other.save()
    repair_end(ended, now=LATER)
    assert set(Node.objects.values_list("state", "cordoned")) == {("ready", False)}
    incident = Incident.objects.get()
    assert (incident.state, incident.evidence["ladder"][0]["state"]) == ("closed", "cured")
    assert Event.objects.filter(kind="node.repaired").count() == 2


def test_an_attempt_that_did_not_help_leaves_the_node_out_of_use() -> None:
    repair_try(TRY, now=NOW)
    repair_end(EndRepair(Repair.objects.get().pk, "n-f", Rung.RESET, False, "matmul: wrong"), now=LATER)
    assert (node().state, Repair.objects.get().cured, Repair.objects.get().result) == ("faulty", False, "matmul: wrong")
    assert Event.objects.latest("id").message == "n-f: reset of its device did not help: matmul: wrong"
    assert Signal.objects.filter(settled_at=None).exists()


REBOOT = TryRepair("n-f", Rung.REBOOT, "nvidia_xid_fatal: XID 79")


def test_a_reboot_is_ordered_from_the_provider_and_followed_by_checks(cloud: Cloud) -> None:
    repair_try(REBOOT, now=NOW)
    assert fleet_view(now=NOW).nodes["n-f"].ordered is ProviderAction.REBOOT
    assert order() is None, "no checks before the reboot"
    provision()
    assert (cloud.rebooted, ProviderCall.objects.exists()) == (["n-f"], False)
    assert Event.objects.filter(kind="node.rebooted").count() == 1
    repair = Repair.objects.get()
    repair_check(CheckRepair(repair.pk, "n-f"), now=LATER)
    assert order() == CheckRequest(Repair.objects.get().request)
    with pytest.raises(StaleDecision):
        repair_check(CheckRepair(repair.pk, "n-f"), now=LATER)


def test_a_reboot_that_its_provider_refuses_has_failed_and_one_that_is_late_is_repeated(cloud: Cloud) -> None:
    repair_try(REBOOT, now=NOW)
    cloud.answer = Later("too many calls", 5.0)
    provision()
    assert (ProviderCall.objects.get().action, Repair.objects.get().ended_at) == ("reboot", None)
    ProviderCall.objects.update(due_at=NOW, claimed_until=None)
    cloud.answer = ProviderError("no power control")
    provision()
    assert not ProviderCall.objects.exists()
    assert Repair.objects.get().result == "its provider refused: no power control"


@pytest.fixture
def clock(now: Clock) -> Iterator[Clock]:
    """Time that passes; the node's agent keeps reporting."""
    with mock.patch("fleet.reconcile.selectors.snapshot.lease_held_since", return_value=NOW - timedelta(hours=1)):
        yield now


def passes(clock: Clock, seconds: float = 1.0) -> datetime:
    clock.now += timedelta(seconds=seconds)
    NodeReport.objects.update(last_seen_at=clock.now)
    reconcile()
    return clock.now


def test_a_node_climbs_the_ladder_on_real_rows_until_a_reboot_cures_it(clock: Clock, cloud: Cloud) -> None:
    passes(clock)
    assert [repair.what for repair in Repair.objects.filter(ended_at=None)] == ["reset_device"]
    wrong = {"check": "matmul", "ok": False, "found": "7 of 9 sums are wrong"}
    report([{"check": "reset", "ok": True, "found": "reset nvidia 0"}, wrong])
    for _ in range(2):
        passes(clock)
    assert ProviderCall.objects.get().action == ProviderAction.REBOOT
    provision()
    passes(clock)
    NodeReport.objects.update(connection_changed_at=passes(clock, 60.0))
    passes(clock)
    report([{**wrong, "ok": True, "found": "exact"}])
    passes(clock)
    assert (node().state, cloud.rebooted, cloud.terminated) == ("ready", ["n-f"], [])
    results = Repair.objects.filter(what__in=["reset_device", "reboot_machine"]).order_by("id")
    assert [(each.cured, each.result) for each in results] == [
        (False, "matmul: 7 of 9 sums are wrong"),
        (True, "1 deep checks passed"),
    ]


@pytest.mark.parametrize(("ok", "state"), [(True, "ready"), (False, "retired")])
def test_a_spare_that_an_operator_resets_returns_if_its_checks_pass_and_is_replaced_otherwise(
    clock: Clock, ok: bool, state: str
) -> None:
    Signal.objects.all().delete()
    Node.objects.update(state="ready", cordoned=False)
    repair_request(node_id="n-f", rung=Rung.RESET, actor="ann", now=clock.now, why="new driver")
    passes(clock)
    assert (node().state, node().reason) == ("faulty", "reset of its device requested by ann: new driver")
    report([{"check": "reset", "ok": True, "found": "reset"}, {"check": "matmul", "ok": ok, "found": "sums"}])
    for _ in range(3):
        passes(clock)
    assert node().state == state


def test_the_incident_stays_open_when_its_cell_is_ready_again_with_another_node() -> None:
    members = [rows.node("n-l"), rows.node("n-m")]
    cell = rows.cell("c1", *members, state=CellState.STARTING.value)
    for kind, subject, name in ((IncidentKind.HARDWARE, "n-f", "n-f"), (IncidentKind.SOFT, "n-l", "n-l")):
        incident_open_decided(OpenIncident(kind, subject, "broke", node=name, cell="c1"), now=NOW)
    cell_move(MoveCell("c1", CellState.STARTING, cell.generation, CellState.READY, "all ranks are ready"), now=LATER)
    assert list(Incident.objects.filter(state="open").values_list("subject", flat=True)) == ["n-f"]
