"""Exact decisions about faults, in order. An incident stays open while its fault comes and goes."""

from dataclasses import replace
from typing import Any

import pytest

from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.views import IncidentKind, Rule, RuleMode
from fleet.reconcile.planning.decisions import (
    CloseIncident,
    CloseReplacement,
    CordonNode,
    DrainCell,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    RetireNode,
)
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import FleetView, ProviderStatus
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet.faults.faulty import HARD, SOFT, VAGUE, incident, replacement, signal, with_faults
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node


def pair(**changes: Any) -> FleetView:
    other = (member("o", of="c2"), member("p", of="c2"), cell("c2", "o", "p"))
    return fleet(member("l"), member("f"), node("s"), cell("c1", "l", "f", **changes), *other, wanted=2)


def plan(view: FleetView) -> tuple[Any, ...]:
    return plan_faults(view, SETTINGS, NOW)


def kinds(view: FleetView) -> list[type]:
    return [type(decision) for decision in plan(view)]


def incidents(view: FleetView) -> list[tuple[str, str]]:
    return [(d.kind, d.subject) for d in plan(view) if isinstance(d, OpenIncident)]


def test_a_fleet_without_faults_is_left_alone() -> None:
    assert plan(pair()) == ()


def test_a_hard_signature_cordons_the_node_and_takes_it_out_of_use_at_once() -> None:
    opened, cordoned, replaced = plan(with_faults(pair(), signal("f")))
    assert (opened.kind, opened.subject, opened.cell, opened.node) == (IncidentKind.HARDWARE, "f", "c1", "f")
    assert opened.summary == f"Node f: {HARD}: it broke"
    assert opened.evidence["signals"][0]["signature"] == HARD
    assert cordoned == CordonNode("f", f"{HARD}: it broke")
    assert replaced == ReplaceNode("f", NodeState.READY, ago(600), "c1", Rule.HARD_SIGNATURE, f"{HARD}: it broke")


def test_a_faulty_spare_is_replaced_as_well() -> None:
    assert kinds(with_faults(pair(), signal("s"))) == [OpenIncident, CordonNode, ReplaceNode]


def test_several_signatures_of_one_node_are_one_incident() -> None:
    view = with_faults(pair(), signal("f"), signal("f", "nvidia_gpu_lost"), signal("f", SOFT))
    assert kinds(view) == [OpenIncident, CordonNode, ReplaceNode]


def test_a_soft_signature_opens_an_incident_and_touches_nothing() -> None:
    assert incidents(with_faults(pair(), signal("f", SOFT))) == [(IncidentKind.SOFT, "f")]
    assert kinds(with_faults(pair(), signal("f", SOFT))) == [OpenIncident]


def test_what_every_rank_sees_of_one_broken_rank_blames_the_cell_and_no_node() -> None:
    (opened,) = plan(with_faults(pair(), signal("l", VAGUE), signal("f", VAGUE)))
    assert (opened.kind, opened.subject, opened.node) == (IncidentKind.UNATTRIBUTED, "c1", "")
    assert opened.evidence["seen_by"] == ["rank 0 on l", "rank 1 on f"]


def test_a_hang_that_a_mates_hard_fault_explains_is_no_incident_of_its_own() -> None:
    assert incidents(with_faults(pair(), signal("l", VAGUE), signal("f"))) == [(IncidentKind.HARDWARE, "f")]


def test_a_hang_in_a_cell_of_one_node_blames_that_node() -> None:
    view = with_faults(fleet(member("l"), node("s"), node("t"), cell("c1", "l")), signal("l", VAGUE))
    assert kinds(view) == [OpenIncident, CordonNode, ReplaceNode]


def test_settled_signals_do_nothing() -> None:
    assert plan(with_faults(pair(), signal("f", settled=True))) == ()


def test_a_node_that_is_faulty_already_is_not_replaced_again() -> None:
    view = fleet(member("l"), member("f", state=NodeState.FAULTY), node("s"), cell("c1", "l", "f"))
    known = incident(IncidentKind.HARDWARE, "f")
    assert plan(with_faults(view, signal("f"), incidents=(known,))) == ()


@pytest.mark.parametrize(
    ("mode", "expected"), [(RuleMode.OFF, []), (RuleMode.SHADOW, [OpenIncident])], ids=["off", "shadow"]
)
def test_a_rule_that_is_not_in_force_touches_nothing(mode: RuleMode, expected: list[type]) -> None:
    view = with_faults(pair(), signal("f"), modes={Rule.HARD_SIGNATURE: mode})
    assert kinds(view) == expected


def test_shadow_says_what_it_would_have_done() -> None:
    (opened,) = plan(with_faults(pair(), signal("f"), modes={Rule.HARD_SIGNATURE: RuleMode.SHADOW}))
    assert opened.shadow
    assert opened.summary == f"Would have replaced node f: {HARD}: it broke"


def test_a_shadow_incident_gives_way_when_its_rule_comes_into_force() -> None:
    known = incident(IncidentKind.HARDWARE, "f", shadow=True)
    decisions = kinds(with_faults(pair(), signal("f"), incidents=(known,)))
    assert [kind.__name__ for kind in decisions] == ["CloseIncident", "OpenIncident", "CordonNode", "ReplaceNode"]


def test_five_repairs_hand_a_node_to_a_person_through_a_drain() -> None:
    view = with_faults(pair(), repairs={"f": 5})
    opened, cordoned, wished = plan(view)
    assert (opened.kind, opened.evidence) == (IncidentKind.REPEATED_REPAIRS, {"repairs": 5})
    assert cordoned.node == "f"
    assert isinstance(wished, RequestReplacement)
    assert plan(with_faults(pair(), repairs={"f": 4})) == ()


def wished(view: FleetView) -> FleetView:
    return with_faults(view, replacements=(replacement("f", "c1", begun=False, reason="slow"),))


def test_a_wished_replacement_drains_a_serving_cell_first() -> None:
    (drained,) = plan(wished(pair()))
    assert (type(drained), drained.cell, drained.cause) == (DrainCell, "c1", "repair")


def test_the_last_cell_of_a_deployment_is_never_drained_for_it() -> None:
    view = fleet(member("l"), member("f"), node("s"), cell("c1", "l", "f"))
    assert plan(wished(view)) == ()


def test_it_takes_the_node_when_the_cell_is_unrouted_and_idle() -> None:
    draining = {"state": CellState.DRAINING, "state_since": ago(5)}
    assert plan(wished(pair(**draining))) == ()
    (replaced,) = plan(wished(pair(**draining, unrouted_at=ago(4))))
    assert isinstance(replaced, ReplaceNode)


def test_a_wish_for_a_node_whose_cell_does_not_serve_waits_for_nothing() -> None:
    assert kinds(wished(pair(state=CellState.FAILED))) == [ReplaceNode]


def test_a_wish_for_a_node_that_is_lost_meanwhile_is_over() -> None:
    view = fleet(member("l"), member("f", state=NodeState.LOST), cell("c1", "l", "f"))
    assert kinds(wished(view)) == [CloseReplacement]


def test_a_replacement_is_done_when_its_cell_is_ready_without_the_node() -> None:
    view = fleet(member("l"), member("s"), cell("c1", "l", "s"))
    gone = replacement("f", "c1")
    assert plan(with_faults(view, replacements=(gone,))) == (CloseReplacement(5, "c1 is ready without it"),)
    starting = replace(view, cells={"c1": cell("c1", "l", "s", state=CellState.STARTING)})
    assert plan(with_faults(starting, replacements=(gone,))) == ()


def test_a_machine_that_a_person_must_look_at_is_not_ended() -> None:
    view = fleet(member("l"), member("f"), cell("c1", "l", "f"), node("x", state=NodeState.FAULTY, cordoned=True))
    assert [d.node for d in plan_reconcile(view, SETTINGS, NOW) if isinstance(d, RetireNode)] == ["x"]
    held = with_faults(view, incidents=(incident(IncidentKind.REPEATED_REPAIRS, "x"),))
    assert not [d for d in plan_reconcile(held, SETTINGS, NOW) if isinstance(d, RetireNode)]


def test_a_dismissed_suspicion_stays_quiet_while_there_is_no_new_evidence() -> None:
    view = with_faults(pair(), repairs={"f": 5}, muted=frozenset({(IncidentKind.REPEATED_REPAIRS, "f")}))
    assert plan(view) == ()
    signalled = with_faults(pair(), signal("f"), muted=frozenset({(IncidentKind.HARDWARE, "f")}))
    assert kinds(signalled) == [OpenIncident, CordonNode, ReplaceNode]


def test_an_incident_says_that_its_cell_cannot_be_drained() -> None:
    view = fleet(member("l"), member("f", cordoned=True), node("s"), cell("c1", "l", "f"))
    wish = replacement("f", "c1", begun=False)
    (opened,) = plan(with_faults(view, repairs={"f": 5}, replacements=(wish,)))
    assert opened.evidence["waits"] == "its cell cannot be drained: no other cell of the deployment is available"


def test_an_open_incident_is_noted_now_and_then_and_never_opened_twice() -> None:
    view = fleet(node("a"), node("b"))
    fresh = incident(IncidentKind.SOFT, "a", seen_at=ago(5))
    assert plan(with_faults(view, signal("a", SOFT), incidents=(fresh,))) == ()
    old = incident(IncidentKind.SOFT, "a", seen_at=ago(20))
    (noted,) = plan(with_faults(view, signal("a", SOFT), incidents=(old,)))
    assert isinstance(noted, NoteIncident)


def test_it_closes_once_its_fault_is_gone_for_long_enough() -> None:
    view = fleet(node("a"), node("b"))
    assert plan(with_faults(view, incidents=(incident(IncidentKind.SOFT, "a", seen_at=ago(59)),))) == ()
    (closed,) = plan(with_faults(view, incidents=(incident(IncidentKind.SOFT, "a", seen_at=ago(61)),)))
    assert closed == CloseIncident(7, ago(61), "not seen for 61 s")


def test_it_closes_at_once_when_its_node_is_retired() -> None:
    known = incident(IncidentKind.HARDWARE, "gone")
    assert plan(with_faults(fleet(node("a")), incidents=(known,))) == (CloseIncident(7, ago(1), "gone was retired"),)


def test_incidents_of_others_are_none_of_its_business() -> None:
    known = incident("node-lost", "a", seen_at=ago(600))
    assert plan(with_faults(fleet(node("a"), node("b")), incidents=(known,))) == ()


def test_a_node_that_a_person_must_look_at_keeps_its_incident() -> None:
    held = node("a", state=NodeState.FAULTY)
    known = incident(IncidentKind.REPEATED_REPAIRS, "a", seen_at=ago(9000))
    assert plan(with_faults(fleet(held, node("b")), incidents=(known,))) == ()


def test_all_agents_silent_is_one_incident_and_nothing_else() -> None:
    silent: dict[str, Any] = {"report": {"last_seen_at": ago(100)}}
    view = fleet(node("a", **silent), node("b", **silent), node("c", **silent))
    (opened,) = plan(with_faults(view, signal("a")))
    assert isinstance(opened, OpenIncident)
    assert opened.kind is IncidentKind.ALL_SILENT


def test_an_agent_that_stays_away_from_a_machine_that_runs_is_told_to_an_operator() -> None:
    away: dict[str, Any] = {"state": NodeState.SUSPECT, "provider": ProviderStatus.RUNNING}
    for silence_s, kinds in ((119, []), (121, [IncidentKind.UNREACHABLE])):
        report = {"connected": False, "last_seen_at": ago(silence_s), "connection_changed_at": ago(silence_s)}
        opened = plan(fleet(node("a", **away, report=report), node("b"), node("c")))
        assert [decision.kind for decision in opened] == kinds


def test_while_nobody_listens_nothing_is_decided() -> None:
    view = fleet(node("a"), node("b"), listening_since=None)
    assert plan(with_faults(view, signal("a"), incidents=(incident(IncidentKind.SOFT, "b", seen_at=ago(900)),))) == ()
