"""A fault of a device touches only the nodes that use it. A fault of a device or machine with several nodes is one
incident, and replaces all of them within the budget of one machine."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.signatures import FaultScope, FaultSignature, fault_scope
from fleet.faults.models import Incident, Replacement, Signal
from fleet.faults.planning.liveness import Guards
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.repairs import is_under_repair, ladder_of, plan_repairs
from fleet.faults.planning.views import (
    Attempt,
    DeviceWindow,
    IncidentKind,
    NoticeView,
    Rule,
    Rung,
    SignalView,
    StepWindow,
)
from fleet.faults.services.incidents import hardware_fault_record, incident_dismiss, incident_open_decided, node_replace
from fleet.reconcile.planning.decisions import CordonNode, OpenIncident, ReplaceNode, TryRepair
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import NodeState, NoticeKind
from kernel.transitions import StaleDecision
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.faults.faulty import HARD, SOFT, incident, replacement, signal, with_faults
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

SHARED, OTHER = "m-0000000a", "m-0000000b"
CHECK = FaultSignature.DEEP_CHECK_FAILED
PORT = FaultSignature.EFA_PORT_DOWN
XID = FaultSignature.NVIDIA_XID_FATAL


def machine(*signals: SignalView, **faults: Any) -> FleetView:
    """Two machines of four nodes, each node with a cell."""
    parts: list[Any] = []
    for place in "ab":
        for number in range(4):
            name = f"{place}{number}"
            shared = (SHARED if place == "a" else OTHER,)
            parts += [member(name, of=f"c-{name}", topology=shared), cell(f"c-{name}", name)]
    return with_faults(fleet(*parts, wanted=8, nodes_per_cell=1), *signals, **faults)


def broken(name: str, signature: str = CHECK) -> SignalView:
    return signal(name, signature, scope=FaultScope.MACHINE)


def plan(view: FleetView) -> tuple[Any, ...]:
    return plan_faults(view, SETTINGS, NOW)


@pytest.mark.parametrize(
    ("signature", "evidence", "scope"),
    [
        ("efa_port_down", {"device": "efa_0"}, "machine"),
        ("nvidia_driver_silent", {}, "machine"),
        ("deep_check_failed", {"check": "memory"}, "machine"),
        ("deep_check_failed", {"check": "disk"}, "machine"),
        ("deep_check_failed", {"check": "matmul cpu"}, "machine"),
        ("deep_check_failed", {"check": "matmul"}, "device"),
        ("nvidia_xid_fatal", {"xid": 79, "device": None}, "machine"),
        ("nvidia_xid_fatal", {"xid": 79, "device": 0}, "device"),
        ("nvidia_xid_fatal", {}, "device"),
        ("accelerator_missing", {}, "device"),
    ],
)
def test_evidence_is_about_a_device_or_about_its_machine(signature: str, evidence: dict[str, Any], scope: str) -> None:
    assert fault_scope(signature, evidence) == scope


def test_a_fault_of_a_device_touches_only_its_node() -> None:
    opened, cordoned, replaced = plan(machine(signal("a1")))
    assert (opened.kind, opened.subject, cordoned.node, replaced.node) == (IncidentKind.HARDWARE, "a1", "a1", "a1")


def test_a_fault_of_a_machine_is_one_incident_and_replaces_all_of_its_nodes() -> None:
    decisions = plan(machine(*(broken(f"a{number}") for number in range(4))))
    (opened,) = [each for each in decisions if isinstance(each, OpenIncident)]
    assert (opened.kind, opened.subject, opened.node, opened.cell) == (IncidentKind.MACHINE, SHARED, "", "")
    assert opened.summary == f"Machine {SHARED}: {CHECK}: it broke; seen by 4 of its 4 nodes"
    assert opened.evidence["nodes"] == ["a0", "a1", "a2", "a3"]
    for kind in (CordonNode, ReplaceNode):
        assert [each.node for each in decisions if isinstance(each, kind)] == ["a0", "a1", "a2", "a3"]
    assert [each.cell for each in decisions if isinstance(each, ReplaceNode)][1] == "c-a1"


def test_one_node_is_enough_to_see_a_fault_of_its_machine() -> None:
    decisions = plan(machine(broken("a2")))
    assert [each.node for each in decisions if isinstance(each, ReplaceNode)] == ["a0", "a1", "a2", "a3"]


def test_the_same_fault_on_most_nodes_is_one_of_their_machine_and_on_half_of_them_is_not() -> None:
    half, most = machine(signal("a0"), signal("a1")), machine(signal("a0"), signal("a1"), signal("a2"))
    opened = [each for each in plan(half) if isinstance(each, OpenIncident)]
    assert [(each.kind, each.subject) for each in opened] == [
        (IncidentKind.HARDWARE, "a0"),
        (IncidentKind.HARDWARE, "a1"),
    ]
    (opened_once,) = [each for each in plan(most) if isinstance(each, OpenIncident)]
    assert (opened_once.kind, opened_once.subject) == (IncidentKind.MACHINE, SHARED)


def test_a_soft_fault_of_a_machine_is_one_incident_and_touches_nothing() -> None:
    (opened,) = plan(machine(*(broken(f"a{number}", PORT) for number in range(4))))
    assert (opened.kind, opened.subject) == (IncidentKind.SOFT, SHARED)
    decisions = plan(machine(broken("a0", PORT), signal("a0", SOFT)))
    assert [(each.kind, each.subject) for each in decisions] == [(IncidentKind.SOFT, SHARED), (IncidentKind.SOFT, "a0")]


def test_a_machine_of_one_node_is_that_node() -> None:
    view = with_faults(fleet(member("n"), cell("c1", "n"), nodes_per_cell=1), broken("n"))
    assert (plan(view)[0].kind, plan(view)[0].subject) == (IncidentKind.HARDWARE, "n")


def test_a_second_machine_waits_until_the_first_is_replaced() -> None:
    work = replacement("a0", "c-a0")
    view = machine(broken("b0"), replacements=(work,))
    assert not [each for each in plan(view) if isinstance(each, ReplaceNode)]
    (opened,) = [each for each in plan(view) if isinstance(each, OpenIncident)]
    assert opened.evidence["waits"] == "1 of 1 replacements of its pool local.cpu in east are under way"
    rest = machine(broken("a1"), replacements=(work,))
    assert [each.node for each in plan(rest) if isinstance(each, ReplaceNode)] == ["a1", "a2", "a3"]


def test_a_silent_machine_is_one_incident() -> None:
    silent: dict[str, Any] = {"connected": False, "last_seen_at": ago(300), "connection_changed_at": ago(300)}
    view = machine()
    nodes: dict[str, NodeView] = {
        name: replace(one, state=NodeState.SUSPECT, report=replace(one.report, **silent)) if name[0] == "a" else one
        for name, one in view.nodes.items()
    }
    (opened,) = [each for each in plan(replace(view, nodes=nodes)) if isinstance(each, OpenIncident)]
    assert (opened.kind, opened.subject) == (IncidentKind.UNREACHABLE, SHARED)
    assert opened.summary.startswith(f"Machine {SHARED} with 4 nodes: no report for 5 min")


def test_an_open_incident_of_a_machine_is_updated_and_not_opened_again() -> None:
    known = incident(IncidentKind.MACHINE, SHARED, node="", seen_at=ago(20))
    assert not [each for each in plan(machine(broken("a0"), incidents=(known,))) if isinstance(each, OpenIncident)]


def test_guards_count_a_machine_once() -> None:
    view = machine(replacements=(replacement("a0"), replacement("a1"), replacement("a2")))
    assert Guards(view, SETTINGS, NOW).budget_refusal(view.nodes["a3"]) == ""


@pytest.mark.django_db
def test_services_count_a_machine_once_and_attach_its_replacements_to_its_incident() -> None:
    names = ["n-a0", "n-a1", "n-b0"]
    nodes = [rows.node(name, topology=[SHARED if "a" in name else OTHER]) for name in names]
    for one in nodes:
        rows.cell(f"c-{one.id}", one)
        hardware_fault_record(node=one, cell="", signature=HARD, summary="s", evidence={}, now=rows.NOW)
    evidence = {"nodes": ["n-a0", "n-a1"]}
    incident_open_decided(OpenIncident(IncidentKind.MACHINE, SHARED, "broke", evidence), now=rows.NOW)

    def replace_node(name: str) -> None:
        decision = ReplaceNode(name, NodeState.READY, rows.NOW, f"c-{name}", Rule.HARD_SIGNATURE, "it broke")
        node_replace(decision, now=rows.NOW)

    replace_node("n-a0")
    replace_node("n-a1")
    with pytest.raises(StaleDecision, match="1 of 1 replacements of its pool"):
        replace_node("n-b0")
    assert {work.incident for work in Replacement.objects.all()} == {Incident.objects.get()}
    page = signed_in().get(f"/incidents/{Incident.objects.get().pk}/").text
    assert all(f'href="/nodes/{name}/"' in page for name in evidence["nodes"])
    found = {name: bearer().get(f"/api/v1/incidents/?node={name}").json()["results"] for name in names}
    assert {name: len(rows) for name, rows in found.items()} == {"n-a0": 1, "n-a1": 1, "n-b0": 0}
    incident_dismiss(incident_id=Incident.objects.get().pk, actor="ann", now=rows.NOW)
    assert set(Signal.objects.filter(settled_at=None).values_list("node", flat=True)) == {"n-b0"}


def test_a_spare_of_the_machine_is_replaced_as_well() -> None:
    view = with_faults(fleet(node("s0", topology=(SHARED,)), node("s1", topology=(SHARED,))), broken("s0"))
    assert [each.node for each in plan(view) if isinstance(each, ReplaceNode)] == ["s0", "s1"]


GPU, PARTNER = "GPU-1", ("a0", "a1")


def of_device(name: str, signature: str = HARD, device: str = GPU) -> SignalView:
    return signal(name, signature, device=device)


def opened_by(view: FleetView) -> list[OpenIncident]:
    return [each for each in plan(view) if isinstance(each, OpenIncident)]


@pytest.mark.parametrize("seen_by", [("a0",), ("a1",), ("a0", "a1")])
def test_a_fault_of_a_shared_device_is_one_incident_that_names_the_nodes_that_use_it(seen_by: tuple[str, ...]) -> None:
    view = machine(*map(of_device, seen_by), sharing={(SHARED, GPU): PARTNER})
    (opened,) = opened_by(view)
    assert (opened.kind, opened.subject, opened.node) == (IncidentKind.HARDWARE, f"{GPU} of {SHARED}", "")
    assert opened.summary == f"Device {GPU} of {SHARED}: {HARD}: it broke; used by a0, a1"
    assert (opened.evidence["device"], opened.evidence["nodes"]) == (GPU, ["a0", "a1"])
    assert [each.node for each in plan(view) if isinstance(each, ReplaceNode)] == ["a0", "a1"]


def test_nodes_that_report_the_same_device_share_it_even_if_no_layout_says_so() -> None:
    (opened,) = opened_by(machine(of_device("a0"), of_device("a2"), of_device("b1")))[:1]
    assert opened.evidence["nodes"] == ["a0", "a2"]
    assert [each.subject for each in opened_by(machine(of_device("a0"), of_device("a2"), of_device("b1")))] == [
        f"{GPU} of {SHARED}",
        "b1",
    ]


def test_a_device_that_all_nodes_of_a_machine_share_is_no_fault_of_the_machine() -> None:
    every = [f"a{number}" for number in range(4)]
    (opened,) = opened_by(machine(*map(of_device, every)))
    assert (opened.kind, opened.subject, opened.evidence["nodes"]) == (
        IncidentKind.HARDWARE,
        f"{GPU} of {SHARED}",
        every,
    )
    different = [of_device(name, device=f"GPU-{name}") for name in every]
    assert [each.kind for each in opened_by(machine(*different))] == [IncidentKind.MACHINE]


def test_a_soft_fault_of_a_shared_device_is_one_warning_and_touches_nothing() -> None:
    shared = {(SHARED, GPU): PARTNER}
    (opened,) = plan(machine(of_device("a0", SOFT), of_device("a1", SOFT), sharing=shared))
    assert (opened.kind, opened.subject) == (IncidentKind.SOFT, f"{GPU} of {SHARED}")


def test_nodes_whose_shared_device_is_throttled_are_one_slow_device() -> None:
    hot = {"nvidia 0": DeviceWindow(0.4, {"hw_thermal_slowdown": 0.9})}
    windows = {
        name: tuple(StepWindow(at, f"c-{name}", 3, {}, {}, hot) for at in range(1000, 1005)) for name in ("a0", "a1")
    }
    (opened,) = opened_by(machine(windows=windows))
    assert (opened.kind, opened.subject, opened.node) == (IncidentKind.SLOW, f"nvidia 0 of {SHARED}", "")
    assert (opened.evidence["device"], opened.evidence["nodes"]) == ("nvidia 0", ["a0", "a1"])
    (alone,) = opened_by(machine(windows={"a1": windows["a1"]}))
    assert (alone.subject, alone.node) == ("a1", "a1")


def impaired(*names: str) -> FleetView:
    """The provider has reported these nodes as impaired for an hour."""
    notices = tuple(NoticeView(name, NoticeKind.IMPAIRED, ago(3600), None, "checks fail") for name in names)
    return replace(machine(), notices=notices)


def test_notices_of_a_machine_with_several_nodes_are_one_incident_and_no_trouble_of_their_zone() -> None:
    view = impaired("a0", "a1", "a2", "a3")
    (opened,) = opened_by(view)
    assert (opened.kind, opened.subject, opened.node) == (IncidentKind.CLOUD_NOTICE, SHARED, "")
    assert opened.summary.startswith(f"Machine {SHARED} with 4 nodes: its provider reports since ")
    assert opened.evidence["nodes"] == ["a0", "a1", "a2", "a3"]
    (alone,) = opened_by(impaired("b2"))
    assert (alone.subject, alone.node, alone.cell) == ("b2", "b2", "c-b2")


def test_one_of_the_nodes_with_a_broken_device_climbs_the_ladder_for_all() -> None:
    nodes = [node(name, state=NodeState.FAULTY, devices=1, topology=(SHARED,)) for name in PARTNER]
    broken_device = of_device("a1", XID)
    shared = {(SHARED, GPU): PARTNER}

    def repairs(*attempts: Attempt, nodes: list[NodeView] = nodes) -> list[Any]:
        mine = {"a0": attempts} if attempts else {}
        view = with_faults(fleet(*nodes), broken_device, sharing=shared, attempts=mine)
        assert all(is_under_repair(view, one, SETTINGS.faults, NOW) for one in view.nodes.values())
        return list(plan_repairs(view, SETTINGS.faults, NOW))

    assert repairs() == [TryRepair("a0", Rung.RESET, f"{XID}: it broke", (GPU,))]
    running = Attempt(1, "a0", Rung.RESET, "it broke", ago(2), request="r")
    assert repairs(running) == []
    checks = (("reset", True, "done"), ("matmul", True, "fine"))
    (ended,) = repairs(replace(running, checks=checks))
    assert (ended.node, ended.others, ended.cured) == ("a0", ("a1",), True)
    in_use = [nodes[0], replace(nodes[1], state=NodeState.READY)]
    view = with_faults(fleet(*in_use), broken_device, sharing=shared)
    ladder = ladder_of(view, in_use[0], SETTINGS.faults, NOW)
    assert ladder is not None
    assert ladder.steps[1].reason == "a1 uses the same device"
