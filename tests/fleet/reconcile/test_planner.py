"""Exact decisions that bring small fleets to their desired state."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from engine_agent.protocol.states import EngineState
from fleet.nodes.planner import Listeners, ListenerView
from fleet.reconcile.planning.decisions import (
    CreateCell,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    MoveCell,
    RetireNode,
    StartCell,
    StopCell,
)
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet.fleets import KIND, NOW, SETTINGS, ago, cell, fleet, member, node

PLACED = "placed on a, b, under network node rack-1: the first cell of llama under spine, leaving 0 spares next to it"
JOINED = "s replaces the lost nodes, under the same network node as a: no spare is nearer"


def plan(view: FleetView) -> tuple[object, ...]:
    return plan_reconcile(view, SETTINGS, NOW)


def only(view: FleetView, kind: type) -> list[object]:
    return [decision for decision in plan(view) if isinstance(decision, kind)]


def test_a_fleet_that_is_as_wanted_needs_nothing() -> None:
    assert plan(fleet(member("a"), member("b"), cell("c1", "a", "b"))) == ()


def test_missing_cells_are_created_one_by_one() -> None:
    view = fleet(member("a"), member("b"), cell("c1", "a", "b"), wanted=3)
    assert plan(view) == (CreateCell("llama", "east", KIND, "3 cells wanted, 1 exist"),) * 2


def test_a_pending_cell_starts_on_spares() -> None:
    view = fleet(node("a"), node("b"), cell("c1", state=CellState.PENDING, generation=0))
    assert plan(view) == (StartCell("c1", CellState.PENDING, 0, ("a", "b"), PLACED),)


def test_a_pending_cell_without_enough_spares_gets_nodes_launched() -> None:
    view = fleet(node("a"), cell("c1", state=CellState.PENDING, generation=0))
    reason = "2 needed in cells and 0 warm, 1 spare and 0 on their way"
    assert plan(view) == (
        ExplainCell("c1", CellState.PENDING, 0, "needs 2 local.cpu; 1 is spare"),
        LaunchNodes("east", KIND, 1, reason, there=1, near=("spine", "rack-1")),
    )


def test_a_deployment_that_makes_no_sense_is_explained_and_left_alone() -> None:
    odd = replace(fleet(wanted=2).deployments["llama"], problem="llama@2 says nothing of local.cpu")
    cells = (cell("c1", "a", "b"), cell("c2", state=CellState.PENDING), cell("c3", "c", state=CellState.FAILED))
    view = replace(fleet(member("a"), member("b"), node("c"), *cells), deployments={"llama": odd})
    assert plan(view) == (
        ExplainCell("c2", CellState.PENDING, 3, odd.problem),
        ExplainCell("c3", CellState.FAILED, 3, f"; waits: {odd.problem}"),
    )


def test_what_a_cell_waits_for_is_said_once_and_again_when_it_changes() -> None:
    waiting = cell("c1", state=CellState.PENDING, generation=0, reason="needs 2 local.cpu; 1 is spare")
    assert only(fleet(node("a"), waiting), ExplainCell) == []
    assert only(fleet(waiting), ExplainCell) != []


def test_a_broken_cell_that_waits_goes_on_saying_why_it_broke() -> None:
    broken = cell("c1", "a", "b", state=CellState.LOST, reason="rank 1 on b is lost; waits: something else")
    (explanation,) = only(fleet(member("a"), member("b", state=NodeState.LOST), broken), ExplainCell)
    assert explanation.reason == "rank 1 on b is lost; waits: needs 1 local.cpu; 0 are spare"  # type: ignore[attr-defined]


def test_one_pass_tells_a_bounded_number_of_cells_what_they_wait_for() -> None:
    cells = [cell(f"c{i}", state=CellState.PENDING, generation=0) for i in range(50)]
    assert len(only(fleet(*cells, wanted=50), ExplainCell)) == SETTINGS.explanations_per_pass


def test_nodes_on_their_way_are_not_launched_twice() -> None:
    view = fleet(node("a"), node("b", state=NodeState.JOINING), cell("c1", state=CellState.PENDING, generation=0))
    assert [type(d) for d in plan(view)] == [ExplainCell]


def test_a_node_that_still_stops_its_old_engine_counts_as_coming() -> None:
    stopping = node("b", report={"state": EngineState.READY, "cell": "old", "generation": 9})
    view = fleet(node("a"), stopping, cell("c1", state=CellState.PENDING, generation=0))
    assert [type(d) for d in plan(view)] == [ExplainCell]


def test_spares_that_wait_for_a_first_cell_are_not_given_to_a_second() -> None:
    view = fleet(
        node("a"),
        cell("c1", state=CellState.PENDING, generation=0),
        cell("c2", state=CellState.PENDING, generation=0, created_at=ago(1)),
        wanted=2,
    )
    assert only(view, StartCell) == []
    assert sum(launch.count for launch in only(view, LaunchNodes)) == 3  # type: ignore[attr-defined]


def test_only_the_dead_node_of_a_lost_cell_is_swapped() -> None:
    view = fleet(member("a"), member("b", state=NodeState.LOST), node("s"), cell("c1", "a", "b", state=CellState.LOST))
    assert only(view, StartCell) == [StartCell("c1", CellState.LOST, 3, ("a", "s"), JOINED)]


def test_a_dead_leader_is_replaced_and_its_follower_leads() -> None:
    view = fleet(member("a", state=NodeState.LOST), member("b"), node("s"), cell("c1", "a", "b", state=CellState.LOST))
    assert only(view, StartCell)[0].nodes == ("b", "s")  # type: ignore[attr-defined]


def test_a_lost_cell_without_a_spare_asks_for_a_node_and_waits() -> None:
    view = fleet(member("a"), member("b", state=NodeState.LOST), cell("c1", "a", "b", state=CellState.LOST))
    assert [type(d) for d in plan(view)] == [ExplainCell, LaunchNodes]
    assert only(view, LaunchNodes)[0].near == ("spine", "rack-1")  # type: ignore[attr-defined]


def test_repair_takes_the_warm_spare_and_a_new_one_is_launched() -> None:
    view = fleet(
        member("a"), member("b", state=NodeState.LOST), node("s"), cell("c1", "a", "b", state=CellState.LOST), warm=1
    )
    assert [type(d) for d in plan(view)] == [StartCell, LaunchNodes]


@pytest.mark.parametrize(
    ("restarts", "age_s", "starts"),
    [(0, 1, False), (0, 3, True), (1, 3, False), (1, 5, True), (5, 60, False), (5, 65, True), (60, 301, True)],
)
def test_a_failed_cell_restarts_whole_after_a_growing_wait(restarts: int, age_s: float, starts: bool) -> None:
    broken = cell("c1", "a", "b", state=CellState.FAILED, state_since=ago(age_s), restarts=restarts)
    decisions = only(fleet(member("a"), member("b"), broken), StartCell)
    assert bool(decisions) is starts


@pytest.mark.parametrize(
    "report",
    [
        {"last_seen_at": ago(61)},
        {"last_seen_at": ago(4)},
        {"connected": False},
        {"connected": False, "last_seen_at": None},
    ],
    ids=["not since it broke", "not lately", "its connection ended", "never"],
)
def test_a_failed_cell_starts_again_once_every_member_was_heard_since_it_broke(report: dict[str, object]) -> None:
    broken = cell("c1", "a", "b", state=CellState.FAILED, state_since=ago(60))
    assert only(fleet(member("a"), member("b", report=report), broken), StartCell) == []
    assert len(only(fleet(member("a"), member("b"), broken), StartCell)) == 1


def test_a_cell_starts_on_no_node_that_is_only_excused_from_being_silent() -> None:
    """Its web process is behind, so it may be dead."""
    excused = member("b", report={"last_seen_at": ago(20), "listener": "w", "quiet": True})
    view = fleet(member("a"), excused, cell("c1", "a", "b", state=CellState.FAILED, state_since=ago(60)))
    listeners = Listeners({"w": ListenerView(None, NOW + timedelta(seconds=5))})
    assert only(replace(view, listeners=listeners), StartCell) == []


def test_a_lost_cell_takes_no_spare_while_another_member_is_silent() -> None:
    """It would start on that member as well, and fail."""
    broken = cell("c1", "a", "b", state=CellState.LOST)
    gone, spare = member("a", state=NodeState.LOST), node("s")
    assert only(fleet(gone, member("b", report={"last_seen_at": ago(61)}), spare, broken), StartCell) == []
    assert len(only(fleet(gone, member("b"), spare, broken), StartCell)) == 1


def test_a_failed_cell_does_not_restart_on_a_suspect_node() -> None:
    broken = cell("c1", "a", "b", state=CellState.FAILED)
    assert plan(fleet(member("a"), member("b", state=NodeState.SUSPECT), broken)) == ()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (cell("c2", "x", "y", created_at=ago(1)), DrainCell),
        (cell("c2", "x", "y", state=CellState.STARTING), MoveCell),
        (cell("c2", "x", "y", state=CellState.FAILED), StopCell),
        (cell("c2", state=CellState.PENDING, generation=0), StopCell),
    ],
)
def test_too_many_cells_end_the_least_useful_one(extra: CellView, expected: type) -> None:
    view = fleet(member("a"), member("b"), member("x", of="c2"), member("y", of="c2"), cell("c1", "a", "b"), extra)
    (decision,) = plan(view)
    assert isinstance(decision, expected)
    assert decision.cell == "c2"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("unrouted_s_ago", "in_flight", "age_s", "stops"),
    [
        (5, 0, 6, True),
        (5, 2, 6, False),
        (None, 0, 6, False),
        (None, 0, 61, True),
        (5, 2, 61, True),
    ],
)
def test_a_draining_cell_stops_when_unrouted_and_idle_or_at_its_deadline(
    unrouted_s_ago: float | None, in_flight: int, age_s: float, stops: bool
) -> None:
    unrouted_at = None if unrouted_s_ago is None else ago(unrouted_s_ago)
    draining = cell("c1", "a", "b", state=CellState.DRAINING, unrouted_at=unrouted_at, state_since=ago(age_s))
    view = fleet(member("a", report={"in_flight": in_flight}), member("b"), draining, wanted=0)
    assert [type(d) for d in plan(view)] == ([StopCell] if stops else [])


def drained(leader: NodeView, **changes: Any) -> FleetView:
    draining = cell("c1", "a", "b", state=CellState.DRAINING, state_since=ago(9), unrouted_at=ago(8))
    return replace(fleet(leader, member("b"), draining, wanted=0), **changes)


@pytest.mark.parametrize(
    "report",
    [
        {"last_seen_at": ago(8.5)},
        {"last_seen_at": ago(7)},
        {"last_seen_at": None},
        {"cell": "c9"},
        {"generation": 2},
    ],
    ids=["before it was unrouted", "measured before it was unrouted", "never", "of another cell", "of another start"],
)
def test_an_idle_report_counts_only_if_it_was_measured_since_nothing_new_arrives(report: dict[str, Any]) -> None:
    assert plan(drained(member("a"))) != ()
    assert plan(drained(member("a", report=report))) == ()


@pytest.mark.parametrize(("listening_since", "stops"), [(None, False), (ago(30), False), (ago(61), True)])
def test_a_drain_deadline_passes_only_while_its_node_could_be_told(
    listening_since: datetime | None, stops: bool
) -> None:
    busy = cell("c1", "a", "b", state=CellState.DRAINING, state_since=ago(900))
    view = fleet(member("a", report={"in_flight": 3}), member("b"), busy, wanted=0, listening_since=listening_since)
    assert bool(plan(view)) is stops


def test_a_draining_cell_is_replaced_at_once() -> None:
    draining = cell("c1", "a", "b", state=CellState.DRAINING)
    assert [type(d) for d in plan(fleet(member("a"), member("b"), draining))] == [CreateCell]


@pytest.mark.parametrize("state", [NodeState.LOST, NodeState.FAULTY, NodeState.RETIRED])
def test_dead_nodes_outside_cells_are_retired_and_retired_ones_that_may_run_are_ended(state: NodeState) -> None:
    view = fleet(node("gone", state=state), wanted=0)
    assert plan(view) == (RetireNode("gone", state, f"it is {state} and in no cell"),)


def test_a_node_that_never_joined_holds_back_the_next_launch_for_a_while() -> None:
    failed = node("x", state=NodeState.LOST, state_since=ago(5), report={"connected": False, "last_seen_at": None})
    assert plan(fleet(failed, wanted=0, warm=1)) == ()
    old = node("x", state=NodeState.LOST, state_since=ago(31), report={"connected": False, "last_seen_at": None})
    assert [type(d) for d in plan(fleet(old, wanted=0, warm=1))] == [RetireNode, LaunchNodes]


@pytest.mark.parametrize(("spare_for_s", "given_back"), [(299, 0), (301, 1)])
def test_surplus_spares_are_given_back_after_a_while(spare_for_s: float, given_back: int) -> None:
    spares = [node(name, spare_since=ago(spare_for_s)) for name in ("s1", "s2")]
    assert len(only(fleet(*spares, wanted=0, warm=1), RetireNode)) == given_back


def test_of_surplus_spares_the_dearest_goes() -> None:
    spares = [node(name, spare_since=ago(301), price_per_hour=price) for name, price in (("s1", 2.0), ("s2", 6.0))]
    (given_back,) = only(fleet(*spares, node("s3", spare_since=ago(301)), wanted=0, warm=2), RetireNode)
    assert given_back == RetireNode(
        "s2", NodeState.READY, "surplus spare for 5 min, at 6.00 $/h more expensive than those that stay"
    )


def test_one_pass_never_asks_for_more_machines_than_its_limit() -> None:
    cells = [cell(f"c{i}", state=CellState.PENDING, generation=0) for i in range(20)]
    assert only(fleet(*cells, wanted=20), LaunchNodes)[0].count == SETTINGS.launches_per_pass  # type: ignore[attr-defined]
