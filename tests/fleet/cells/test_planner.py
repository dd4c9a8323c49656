"""A cell's state from its members' reports."""

from datetime import datetime

import pytest

from engine_agent.protocol.states import EngineState
from fleet.cells.planner import plan_health
from fleet.reconcile.planning.decisions import MoveCell
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

STARTING = CellState.STARTING


def verdict(view: FleetView) -> tuple[CellState, str] | None:
    decisions = plan_health(view, SETTINGS, NOW)
    assert len(decisions) <= 1
    for decision in decisions:
        assert isinstance(decision, MoveCell)
        return decision.to, decision.reason
    return None


def test_a_cell_is_ready_when_every_rank_says_so_at_its_generation() -> None:
    view = fleet(member("l"), member("f"), cell("c1", "l", "f", state=STARTING))
    assert verdict(view) == (CellState.READY, "all 2 ranks are ready")


@pytest.mark.parametrize("generation", [2, 4])
def test_a_report_of_another_generation_does_not_count(generation: int) -> None:
    view = fleet(member("l"), member("f", generation=generation), cell("c1", "l", "f", state=STARTING))
    assert verdict(view) is None


def test_a_report_of_another_cell_does_not_count() -> None:
    assert verdict(fleet(member("l"), member("f", of="c9"), cell("c1", "l", "f", state=STARTING))) is None


@pytest.mark.parametrize("state", [CellState.STARTING, CellState.READY, CellState.DRAINING])
def test_one_failed_rank_fails_the_cell_and_is_named(state: CellState) -> None:
    failed = member("f", report={"state": EngineState.FAILED, "reason": "engine killed by SIGKILL"})
    to, reason = verdict(fleet(member("l"), failed, cell("c1", "l", "f", state=state))) or (None, "")
    assert (to, reason) == (CellState.FAILED, "rank 1 on f: engine killed by SIGKILL")


def test_who_said_that_a_cell_failed_is_remembered() -> None:
    failed = member("f", report={"state": EngineState.FAILED})
    decided = plan_health(fleet(member("l"), failed, cell("c1", "l", "f")), SETTINGS, NOW)
    assert [move.failed_by for move in decided if isinstance(move, MoveCell)] == ["f"]
    lost = fleet(member("l"), member("f", state=NodeState.LOST), cell("c1", "l", "f"))
    assert [move.failed_by for move in plan_health(lost, SETTINGS, NOW) if isinstance(move, MoveCell)] == [""]


def test_a_lost_node_loses_the_cell_even_while_the_leader_looks_healthy() -> None:
    view = fleet(member("l"), member("f", state=NodeState.LOST), cell("c1", "l", "f"))
    assert verdict(view) == (CellState.LOST, "rank 1 on f is lost")


def test_a_suspect_node_changes_nothing() -> None:
    assert verdict(fleet(member("l"), member("f", state=NodeState.SUSPECT), cell("c1", "l", "f"))) is None


@pytest.mark.parametrize(("age_s", "fails"), [(329, False), (331, True)])
def test_a_cell_that_does_not_start_in_time_fails(age_s: float, fails: bool) -> None:
    waiting = node("f", report={"state": EngineState.STARTING, "cell": "c1", "generation": 3})
    view = fleet(member("l"), waiting, cell("c1", "l", "f", state=STARTING, state_since=ago(age_s)))
    assert (verdict(view) is not None) is fails


@pytest.mark.parametrize(("seconds", "fails"), [(1, False), (9, False), (11, True)])
def test_one_failed_probe_is_no_fault_but_ten_seconds_of_them_are(seconds: float, fails: bool) -> None:
    leader = member("l", report={"unhealthy_since": ago(seconds), "health_reason": "no token in 5 s"})
    found = verdict(fleet(leader, member("f"), cell("c1", "l", "f")))
    assert (found is not None) is fails
    assert found is None or "no token in 5 s" in found[1]


def test_an_old_word_of_ill_health_does_not_grow_older_into_a_failure() -> None:
    leader = member("l", report={"unhealthy_since": ago(302), "last_seen_at": ago(300)})
    assert verdict(fleet(leader, member("f"), cell("c1", "l", "f"))) is None


@pytest.mark.parametrize(("listening_since", "fails"), [(None, False), (ago(60), False), (ago(331), True)])
def test_a_start_has_all_its_time_while_its_nodes_can_be_heard(listening_since: datetime | None, fails: bool) -> None:
    starting = cell("c1", "l", "f", state=STARTING, state_since=ago(900))
    waiting = node("f", report={"state": EngineState.STARTING, "cell": "c1", "generation": 3})
    assert (verdict(fleet(member("l"), waiting, starting, listening_since=listening_since)) is not None) is fails


def test_a_cell_whose_nodes_run_different_software_does_not_become_ready_and_says_in_what() -> None:
    same = {"neuron_driver": "2.27", "vllm.engine": "vllm 0.16.0"}
    leader = member("l", software=same)
    follower = member("f", software={**same, "neuron_driver": "2.26"})
    view = fleet(leader, follower, cell("c1", "l", "f", state=STARTING))
    expected = "fingerprint mismatch: rank 1 (f) differs from rank 0 (l): neuron_driver is 2.26 instead of 2.27"
    assert verdict(view) == (CellState.FAILED, expected)


def test_another_engine_on_a_node_and_a_node_that_has_said_nothing_are_no_mismatch() -> None:
    nodes = member("l", software={"kernel": "6", "other.engine": "1"}), member("f", software={"kernel": "6"})
    assert verdict(fleet(*nodes, cell("c1", "l", "f", state=STARTING))) == (CellState.READY, "all 2 ranks are ready")
    nodes = member("l", software={"kernel": "6"}), member("f")
    assert verdict(fleet(*nodes, cell("c1", "l", "f", state=STARTING))) == (CellState.READY, "all 2 ranks are ready")


def test_a_cell_that_serves_is_not_ended_for_software_that_changed_under_it() -> None:
    nodes = member("l", software={"kernel": "6"}), member("f", software={"kernel": "7"})
    assert verdict(fleet(*nodes, cell("c1", "l", "f"))) is None


def test_cells_that_do_not_run_are_left_alone() -> None:
    view = fleet(member("l", state=NodeState.LOST), cell("c1", "l", state=CellState.FAILED))
    assert verdict(view) is None
