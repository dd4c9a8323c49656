"""Faults of many machines have one cause: rollouts halt, and no hardware is touched."""

from dataclasses import replace
from typing import Any

from fleet.planning.decisions import ChangeRollout, OpenIncident
from fleet.planning.fault_rules import IncidentKind
from fleet.planning.faults.common_cause import is_common
from fleet.planning.faults.planner import plan_faults
from fleet.planning.policy import UpdatePolicy
from fleet.planning.snapshot import FleetView, RolloutView
from fleet.planning.states import CellState, RolloutState
from tests.fleet.planning.faults.faulty import HARD, incident, signal, with_faults
from tests.fleet.planning.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

FAULTS = SETTINGS.faults


def rollout(state: RolloutState = RolloutState.RUNNING, **changes: Any) -> RolloutView:
    view = RolloutView(3, "llama", "llama@1", "llama@2", state, 1, ("east",), UpdatePolicy(), 9, ago(30))
    return replace(view, **changes)


def cells(count: int, failed: int = 0) -> FleetView:
    parts: list[Any] = []
    for number in range(count):
        state = CellState.FAILED if number < failed else CellState.READY
        parts += [member(f"n{number}", of=f"c{number}"), cell(f"c{number}", f"n{number}", state=state)]
    return replace(fleet(*parts, nodes_per_cell=1, wanted=count), rollouts={"llama": rollout()})


def plan(view: FleetView) -> tuple[Any, ...]:
    return plan_faults(view, SETTINGS, NOW)


def halts(view: FleetView) -> list[ChangeRollout]:
    return [decision for decision in plan(view) if isinstance(decision, ChangeRollout)]


def test_a_third_is_not_yet_common_and_two_never_are() -> None:
    assert not is_common(3, 9, FAULTS)
    assert is_common(4, 9, FAULTS)
    assert not is_common(2, 2, FAULTS)


def test_the_same_hard_signature_in_over_a_third_of_the_machines_blames_none() -> None:
    view = with_faults(cells(6), *(signal(f"n{number}") for number in range(3)))
    decisions = plan(view)
    assert {type(decision) for decision in decisions} == {OpenIncident, ChangeRollout}
    common = next(d for d in decisions if isinstance(d, OpenIncident) and d.kind is IncidentKind.COMMON_CAUSE)
    assert common.summary == f"Common cause: {HARD} in 3 of 6 nodes of local.cpu"
    assert common.evidence["below"] == ["spine", "rack-1"]
    waits = {d.evidence["waits"] for d in decisions if isinstance(d, OpenIncident) and d.node}
    assert waits == {f"common cause: {HARD}: nodes of local.cpu"}


def test_machines_replaced_meanwhile_count_towards_a_common_cause() -> None:
    settled = [signal(f"old{number}", settled=True) for number in range(3)]
    decisions = plan(with_faults(cells(4), *settled, signal("n0")))
    assert {type(decision) for decision in decisions} == {OpenIncident, ChangeRollout}
    assert next(d for d in decisions if d.kind is IncidentKind.COMMON_CAUSE).evidence["size"] == 7


def test_faults_that_lie_far_apart_have_no_common_cause() -> None:
    view = with_faults(cells(6), *(signal(f"n{number}", last_at=ago(700 * number)) for number in range(3)))
    assert not [d for d in plan(view) if isinstance(d, OpenIncident) and d.kind is IncidentKind.COMMON_CAUSE]


def test_cells_that_fail_together_halt_their_rollout() -> None:
    (halted,) = halts(cells(6, failed=3))
    assert (halted.rollout, halted.to, halted.revision) == (3, RolloutState.PAUSED, 9)
    assert halted.reason == "Common cause: failed in 3 of 6 cells of llama"
    assert halts(cells(6, failed=2)) == []


def test_a_rollout_that_a_person_resumed_under_an_open_incident_goes_on() -> None:
    view = cells(6, failed=3)
    known = incident(IncidentKind.COMMON_CAUSE, "failed: cells of llama", opened_at=ago(25), node="")
    assert halts(with_faults(view, incidents=(known,)))
    resumed = replace(view, rollouts={"llama": rollout(state_since=ago(5))})
    assert halts(with_faults(resumed, incidents=(known,))) == []


def test_rollouts_of_other_deployments_go_on() -> None:
    view = cells(6, failed=3)
    assert halts(replace(view, rollouts={"other": rollout(deployment="other")})) == []


def test_a_rollout_that_rolls_back_is_never_held_up() -> None:
    view = cells(6, failed=3)
    assert halts(replace(view, rollouts={"llama": rollout(RolloutState.ROLLING_BACK)})) == []


def test_spares_alone_are_a_cohort_too() -> None:
    view = with_faults(
        fleet(*(node(f"s{number}") for number in range(4))), *(signal(f"s{number}") for number in (0, 1, 2))
    )
    assert {type(decision) for decision in plan(view)} == {OpenIncident}
