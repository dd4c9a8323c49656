"""Exact decisions for each notice in small fleets."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.states import EngineState
from fleet.faults.planning.liveness import plan_liveness
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.views import IncidentKind, ReplacementView, Rule, RuleMode
from fleet.reconcile.planning.decisions import (
    CloseReplacement,
    CordonNode,
    DrainCell,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    RetireNode,
    UncordonNode,
)
from fleet.reconcile.planning.planner import PLANNERS, plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, NodeView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, NoticeKind
from tests.fleet.faults.faulty import DAYS, SPOT, incident, notice, of_c1, planned, replacement, told
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, member, node


def test_nothing_is_decided_where_nothing_was_announced() -> None:
    assert planned(told(*of_c1())) == []


@pytest.mark.parametrize("kind", [kind for kind in NoticeKind if kind is not NoticeKind.IMPAIRED])
def test_a_node_with_a_notice_is_cordoned_first(kind: NoticeKind) -> None:
    lead_s = None if kind is NoticeKind.REBALANCE else 1000.0
    (cordoned,) = planned(told(*of_c1(cordoned=""), notice("n", kind, lead_s)))
    assert isinstance(cordoned, CordonNode)
    assert cordoned.reason.startswith(f"provider notice, {kind}")


def test_of_a_spot_warning_the_cell_drains_at_once_spare_or_none() -> None:
    (asked,) = planned(told(*of_c1(), notice("n")))
    assert asked == RequestReplacement(
        "n", "c1", Rule.NOTICE, "provider notice, interruption, ends at 2026-11-21 12:02:00 UTC: said so"
    )


def test_with_days_to_go_it_is_replaced_once_a_spare_fits() -> None:
    later = notice("n", NoticeKind.RETIREMENT, DAYS)
    assert planned(told(*of_c1(), later)) == []
    (asked,) = planned(told(*of_c1(), node("s"), later))
    assert isinstance(asked, RequestReplacement)


def test_meanwhile_a_machine_is_bought_near_those_that_stay() -> None:
    view = told(*of_c1(), notice("n", NoticeKind.RETIREMENT, DAYS))
    (bought,) = plan_reconcile(view, SETTINGS, NOW)
    assert (bought.count, bought.near) == (1, ("spine", "rack-1"))  # type: ignore[union-attr]


def test_for_a_recommendation_nothing_is_bought_and_a_spare_is_taken() -> None:
    maybe = notice("n", NoticeKind.REBALANCE, None)
    assert planned(told(*of_c1(), maybe)) == []
    assert plan_reconcile(told(*of_c1(), maybe), SETTINGS, NOW) == ()
    assert isinstance(planned(told(*of_c1(), node("s"), maybe))[0], RequestReplacement)


def waiting(name: str = "n") -> dict[str, tuple[ReplacementView, ...]]:
    return {"replacements": (replacement(name, "c1", begun=False, rule=Rule.NOTICE),)}


def test_the_ledger_decides_until_waiting_would_cost_requests() -> None:
    """c2 has been ready for only 10 s, so c1 may not drain. Its drain takes 60 s, with 40 s of margin."""
    parts = (*of_c1(), node("s"))
    young = {"p": member("p", of="c2"), "q": member("q", of="c2")}
    for lead_s, forced in ((101.0, False), (99.0, True)):
        view = told(*parts, notice("n", lead_s=lead_s), faults=waiting())
        view = replace(
            view,
            cells={**view.cells, "c2": replace(view.cells["c2"], state_since=ago(10))},
            nodes={**view.nodes, **young},
        )
        drains = [one for one in planned(view) if isinstance(one, DrainCell)]
        assert [(one.cell, one.cause, one.forced) for one in drains] == [("c1", DisruptionCause.REPAIR, True)] * forced
        assert not [one for one in plan_faults(view, SETTINGS, NOW) if isinstance(one, DrainCell)]


def test_it_is_forced_for_the_peer_of_a_node_that_is_replaced_already() -> None:
    view = told(*of_c1(cordoned="no"), notice("n", lead_s=80.0), notice("o", lead_s=90.0), faults=waiting())
    (drain,) = planned(view)
    assert isinstance(drain, DrainCell)
    assert drain.forced


def test_with_leave_the_cell_goes_by_the_ledger_like_for_any_repair() -> None:
    drains = [
        one
        for one in plan_faults(told(*of_c1(), notice("n"), faults=waiting()), SETTINGS, NOW)
        if isinstance(one, DrainCell)
    ]
    assert [(one.cell, one.forced) for one in drains] == [("c1", False)]


def test_two_replacements_of_one_pass_share_the_ledger() -> None:
    view = told(
        *of_c1(),
        notice("n"),
        notice("p"),
        faults={
            "replacements": (
                *waiting()["replacements"],
                replacement("p", "c2", id=6, begun=False, rule=Rule.NOTICE),
            )
        },
    )
    drains = [one for one in plan_faults(view, SETTINGS, NOW) if isinstance(one, DrainCell)]
    assert [one.cell for one in drains] == ["c1"]


@pytest.mark.parametrize(("lead_s", "kind"), [(SPOT, NoticeKind.INTERRUPTION), (DAYS, NoticeKind.MAINTENANCE)])
def test_of_a_broken_cell_all_that_leave_are_taken_when_it_is_time_or_spares_are_there(
    lead_s: float, kind: NoticeKind
) -> None:
    parts = of_c1(cordoned="no", state=CellState.FAILED)
    both = [notice(name, kind, lead_s) for name in "no"]
    without = planned(told(*parts, *both))
    assert [type(one) for one in without] == ([ReplaceNode] * 2 if lead_s == SPOT else [])
    decided = planned(told(*parts, node("s"), node("t"), *both))
    assert [(type(one), one.node, one.rule) for one in decided] == [(ReplaceNode, name, Rule.NOTICE) for name in "no"]


def test_a_start_goes_on_unless_it_would_end_too_late() -> None:
    starting = of_c1(state=CellState.STARTING)
    assert planned(told(*starting, notice("n", lead_s=500.0))) == []
    assert isinstance(planned(told(*starting, notice("n")))[0], ReplaceNode)


def test_a_spare_goes_once_its_substitute_is_there_or_at_its_end() -> None:
    spare = node("s", cordoned=True)
    later, now_ = notice("s", lead_s=500.0), notice("s", lead_s=5.0)
    assert planned(told(*of_c1(), spare, later, warm=1)) == []
    for view in (told(*of_c1(), spare, node("t"), later, warm=1), told(*of_c1(), spare, now_, warm=1)):
        (retired,) = planned(view)
        assert (type(retired), retired.node, retired.seen) == (RetireNode, "s", NodeState.READY)


def test_a_spare_that_still_stops_an_engine_waits_for_it() -> None:
    busy = node("s", cordoned=True, report={"state": EngineState.DRAINING})
    assert planned(told(*of_c1(), busy, notice("s", lead_s=500.0))) == []


def test_a_cell_all_of_whose_machines_end_is_left_to_scaling_which_makes_another_first() -> None:
    view = told(*of_c1(cordoned="no"), notice("n", lead_s=500.0), notice("o", lead_s=600.0))
    assert planned(view) == []
    created = plan_reconcile(view, SETTINGS, NOW)[0]
    assert created.reason == "2 cells wanted, 1 exist, and 1 whose machines end"  # type: ignore[union-attr]
    fresh = cell("c3", state=CellState.PENDING, members=())
    kept = plan_reconcile(replace(view, cells={**view.cells, "c3": fresh}), SETTINGS, NOW)
    assert not [one for one in kept if isinstance(one, DrainCell)]
    ready = (member("x", of="c3"), member("y", of="c3"))
    there = replace(
        view,
        cells={**view.cells, "c3": cell("c3", "x", "y", state_since=ago(100))},
        nodes={**view.nodes, **{one.id: one for one in ready}},
    )
    (drain,) = [one for one in plan_reconcile(there, SETTINGS, NOW) if isinstance(one, DrainCell)]
    assert (drain.cell, drain.cause, drain.forced) == ("c1", DisruptionCause.SCALE, False)


def test_at_the_end_of_its_time_it_drains_whatever_is_there() -> None:
    view = told(*of_c1(cordoned="no"), notice("n", lead_s=90.0), notice("o", lead_s=600.0))
    fresh = cell("c3", state=CellState.PENDING, members=())
    decided = plan_reconcile(replace(view, cells={**view.cells, "c3": fresh}), SETTINGS, NOW)
    (drain,) = [one for one in decided if isinstance(one, DrainCell)]
    assert (drain.cell, drain.forced) == ("c1", True)


def test_a_drain_lasts_until_the_machine_ends_while_nothing_waits_for_its_place() -> None:
    drains = cell("c1", "n", "o", state=CellState.DRAINING, state_since=ago(70), disruption=DisruptionCause.REPAIR)
    busy = [member(name, cordoned=True, report={"in_flight": 3}) for name in "no"]

    def taken(*parts: Any) -> list[Any]:
        view = told(*busy, drains, *parts, faults=waiting())
        return [one for one in plan_faults(view, SETTINGS, NOW) if isinstance(one, ReplaceNode)]

    assert taken(notice("n", lead_s=50.0)) == []
    assert len(taken(notice("n", lead_s=9.0))) == 1
    assert len(taken(notice("n", lead_s=50.0), node("s"))) == 1


def test_impaired_is_a_second_witness_against_silence_and_an_incident_after_five_minutes() -> None:
    silent = member("n", state=NodeState.SUSPECT, report={"last_seen_at": ago(40), "connected": False})
    impaired = notice("n", NoticeKind.IMPAIRED, None)
    view = told(silent, member("o"), cell("c1", "n", "o"), impaired)
    (lost,) = plan_liveness(view, SETTINGS, NOW)
    assert lost.reason == "silent for 40 s, and its provider says the machine is impaired: said so"  # type: ignore[union-attr]
    assert planned(told(*of_c1(cordoned=""), impaired)) == []
    assert plan_faults(told(*of_c1(), impaired), SETTINGS, NOW) == ()
    (opened,) = plan_faults(told(*of_c1(), replace(impaired, at=ago(301))), SETTINGS, NOW)
    assert (type(opened), opened.kind, opened.node) == (OpenIncident, IncidentKind.CLOUD_NOTICE, "n")  # type: ignore[union-attr]


def test_the_incident_closes_when_the_notice_is_settled() -> None:
    known = incident(IncidentKind.CLOUD_NOTICE, "n", seen_at=ago(61))
    assert len(plan_faults(told(*of_c1(), faults={"incidents": (known,)}), SETTINGS, NOW)) == 1


def test_of_a_zone_in_trouble_nobody_is_blamed_and_nothing_is_moved_that_need_not() -> None:
    impaired = [notice(name, NoticeKind.IMPAIRED, None) for name in "nop"]
    maybe = notice("n", NoticeKind.REBALANCE, None)
    view = told(*of_c1(), node("s"), *impaired, maybe)
    assert planned(view) == []
    (opened,) = plan_faults(view, SETTINGS, NOW)
    assert (opened.kind, opened.subject) == (IncidentKind.CLOUD_NOTICE, "zone spine")  # type: ignore[union-attr]
    assert len(planned(told(*of_c1(), notice("n"), *impaired))) == 1, "what ends in any case is replaced"


@pytest.mark.parametrize("mode", [RuleMode.OFF, RuleMode.SHADOW])
def test_a_rule_that_is_not_in_force_touches_nothing(mode: RuleMode) -> None:
    view = told(*of_c1(cordoned=""), notice("n"), faults={"modes": {Rule.NOTICE: mode}})
    decided = next((decided for planner in PLANNERS if (decided := planner(view, SETTINGS, NOW))), ())
    assert [(type(one), one.shadow) for one in decided] == [(OpenIncident, True)] * (mode is RuleMode.SHADOW)  # type: ignore[union-attr]


@pytest.mark.parametrize("cut_off", [{"listening_since": None}, {}])
def test_while_no_agent_is_heard_nothing_is_done(cut_off: dict[str, Any]) -> None:
    view = told(*of_c1(cordoned=""), notice("n"), **cut_off)
    silent = {name: replace(one, report=replace(one.report, last_seen_at=ago(300))) for name, one in view.nodes.items()}
    assert planned(replace(view, nodes=silent)) == []


def test_what_is_announced_freezes_no_pool() -> None:
    """The machines are faulty and their cells wait for others. Notices say nothing about our view of the pool."""
    gone = [member(name, state=NodeState.FAULTY, of="c1") for name in "abcd"]
    view = told(*gone, cell("c1", "a", "b", "c", "d", state=CellState.LOST), *[notice(name) for name in "abcd"])
    assert not [one for one in plan_faults(view, SETTINGS, NOW) if isinstance(one, OpenIncident)]


def cordoned_for_notice() -> list[NodeView | CellView]:
    ranks = [member("n", cordoned=True, cordoned_for_notice=True), member("o")]
    return [*ranks, cell("c1", "n", "o", state_since=ago(300))]


def test_a_node_is_let_back_once_all_that_it_was_cordoned_for_is_called_off() -> None:
    (back,) = planned(told(*cordoned_for_notice()))
    assert isinstance(back, UncordonNode)
    assert back.node == "n"
    still = notice("n", NoticeKind.MAINTENANCE, DAYS)
    assert not any(isinstance(one, UncordonNode) for one in planned(told(*cordoned_for_notice(), still)))


def test_whom_a_person_or_a_fault_cordoned_is_not_let_back() -> None:
    assert planned(told(*of_c1())) == []


@pytest.mark.parametrize(
    ("rule", "begun", "is_back"),
    [(Rule.NOTICE, False, True), (Rule.NOTICE, True, False), (Rule.SLOW, False, False)],
)
def test_its_replacement_is_closed_with_it_unless_it_began_or_has_another_reason(
    rule: Rule, begun: bool, is_back: bool
) -> None:
    work = replace(replacement("n", cell="c1"), rule=rule, begun=begun)
    decisions = planned(told(*cordoned_for_notice(), faults={"replacements": (work,)}))
    assert [type(one) for one in decisions] == ([CloseReplacement, UncordonNode] if is_back else [])
