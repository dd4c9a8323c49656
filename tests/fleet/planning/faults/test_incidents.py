"""Incidents stay one as long as their fault comes and goes, and close by themselves."""

from typing import Any

from fleet.planning.decisions import CloseIncident, NoteIncident, OpenIncident
from fleet.planning.fault_rules import IncidentKind
from fleet.planning.faults.planner import plan_faults
from fleet.planning.snapshot import FleetView, ProviderStatus
from fleet.planning.states import NodeState
from tests.fleet.planning.faults.faulty import SOFT, incident, signal, with_faults
from tests.fleet.planning.fleets import NOW, SETTINGS, ago, fleet, node


def plan(view: FleetView) -> tuple[Any, ...]:
    return plan_faults(view, SETTINGS, NOW)


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
