"""Common causes halt rollouts and touch no hardware. A slow node is found by its own computing time, and its cell mates
are not blamed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.deployments.planner import UpdatePolicy
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.slow import find_slow, relative_times
from fleet.faults.planning.suspicions import is_common
from fleet.faults.planning.views import DeviceWindow, IncidentKind, Rule, RuleMode, StepWindow
from fleet.reconcile.planning.decisions import ChangeRollout, CordonNode, OpenIncident, RequestReplacement
from fleet.reconcile.planning.snapshot import FleetView, RolloutView
from fleet.reconcile.planning.states import CellState, RolloutState
from tests.fleet.faults.faulty import HARD, incident, signal, windows, with_faults
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

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


STEADY = (20.0, 20.2, 19.9, 20.1, 20.0)


def slow_cells(count: int, slow: Mapping[str, tuple[float, ...]], **changes: Any) -> FleetView:
    """Cells of a leader and a follower. All ranks are steady except those in `slow`."""
    parts: list[Any] = [node(f"s{number}") for number in range(4)]
    known = {}
    for number in range(count):
        leader, follower, name = f"l{number}", f"f{number}", f"c{number}"
        parts += [member(leader, of=name), member(follower, of=name), cell(name, leader, follower)]
        for rank in (leader, follower):
            known[rank] = windows(name, slow.get(rank, STEADY), **changes)
    return with_faults(fleet(*parts, wanted=count), windows=known)


def found(view: FleetView) -> list[str]:
    return [slow.node for slow in find_slow(view, FAULTS)]


def test_the_slow_rank_is_blamed_and_not_its_cell_mate() -> None:
    assert found(slow_cells(6, {"f3": (40.0,) * 5})) == ["f3"]


def test_fewer_than_five_peers_are_no_cohort() -> None:
    assert found(slow_cells(5, {"f3": (40.0,) * 5})) == []


@pytest.mark.parametrize(("slow", "expected"), [(2, []), (3, ["f3"])])
def test_three_windows_of_five_must_be_slow(slow: int, expected: list[str]) -> None:
    times = (40.0,) * slow + (20.0,) * (5 - slow)
    assert found(slow_cells(6, {"f3": times})) == expected


@pytest.mark.parametrize(("step_ms", "expected"), [(28.0, []), (29.0, ["f3"])])
def test_its_score_must_be_below_seven_tenths(step_ms: float, expected: list[str]) -> None:
    assert found(slow_cells(6, {"f3": (step_ms,) * 5})) == expected


def test_a_cohort_that_varies_as_much_blames_nobody() -> None:
    spread = {f"f{number}": (20.0 + 6 * number,) * 5 for number in range(6)}
    assert found(slow_cells(6, spread)) == []


@pytest.mark.parametrize(
    ("ranks_ms", "expected"),
    [
        pytest.param((20.0, 20.2, 40.0), ["r2"], id="a follower"),
        pytest.param((40.0, 20.0, 20.2), ["r0"], id="the leader"),
        pytest.param((20.0, 20.2, 20.1, 19.9, 90.0), ["r4"], id="one of five"),
        pytest.param((20.0, 20.2, 28.0), [], id="above seven tenths of the speed"),
        pytest.param((20.0, 26.0, 40.0), [], id="ranks that vary as much"),
        pytest.param((20.0, 40.0, 40.2), [], id="most are slow"),
        pytest.param((20.0, 40.0), [], id="of two ranks either may have stalled"),
        pytest.param((40.0,), [], id="alone"),
    ],
)
def test_a_rank_of_a_single_cell_is_judged_by_the_other_ranks(ranks_ms: Sequence[float], expected: list[str]) -> None:
    names = [f"r{number}" for number in range(len(ranks_ms))]
    known = {name: windows("c1", (ms,) * 5) for name, ms in zip(names, ranks_ms, strict=True)}
    view = with_faults(fleet(*(member(name) for name in names), cell("c1", *names), wanted=1), windows=known)
    assert found(view) == expected
    for one in find_slow(view, FAULTS):
        others = len(ranks_ms) - 1
        assert one.reason.startswith("slower than the other ranks of its cell in 5 of 5 windows: score 0.")
        assert one.reason.endswith(f"{others} peers")


def of_cells(steps_ms: Mapping[str, float], nodes: int) -> FleetView:
    """Cells whose ranks are not measured, such as Neuron's: the step of each as its proxy saw it."""
    parts: list[Any] = []
    known = {}
    for name, ms in steps_ms.items():
        ranks = [f"{name}-{rank}" for rank in range(nodes)]
        parts += [*(member(rank, of=name) for rank in ranks), cell(name, *ranks)]
        known[ranks[0]] = tuple(replace(one, of_cell=True) for one in windows(name, (ms,) * 5))
    return with_faults(fleet(*parts, nodes_per_cell=nodes, wanted=len(steps_ms)), windows=known)


@pytest.mark.parametrize(
    ("nodes", "subject", "node", "adds"),
    [(1, "c3-0", "c3-0", ""), (2, "c3", "", "; any of its 2 nodes may be the slow one")],
)
def test_a_slow_cell_without_measured_ranks_is_an_incident_that_touches_nothing(
    nodes: int, subject: str, node: str, adds: str
) -> None:
    view = of_cells({f"c{number}": 40.0 if number == 3 else 20.0 + number / 10 for number in range(6)}, nodes)
    (opened,) = plan_faults(view, SETTINGS, NOW)
    assert isinstance(opened, OpenIncident)
    assert (opened.kind, opened.subject, opened.node, opened.cell) == (IncidentKind.SLOW, subject, node, "c3")
    assert f" {subject}: slower than its cohort in 5 of 5 windows: score 0.51" in opened.summary
    assert opened.summary.endswith(f"5 peers{adds}")
    assert opened.cohort.startswith("cells of ")
    assert opened.evidence["members"] == [f"c3-{rank}" for rank in range(nodes)]
    off = replace(view, faults=replace(view.faults, modes={Rule.SLOW: RuleMode.OFF}))
    assert plan_faults(off, SETTINGS, NOW) == ()
    assert (
        plan_faults(of_cells({f"c{number}": 20.0 + 20 * (number > 3) for number in range(5)}, nodes), SETTINGS, NOW)
        == ()
    )


def test_windows_of_an_older_generation_say_nothing() -> None:
    assert found(slow_cells(6, {"f3": (40.0,) * 5}, generation=2)) == []


def test_larger_batches_do_not_make_a_node_slow() -> None:
    view = {f"n{number}": StepWindow(1, "c", 1, {0: 100}, {0: 2000.0}) for number in range(6)}
    view |= {f"m{number}": StepWindow(1, "c", 1, {5: 100}, {5: 9000.0}) for number in range(6)}
    assert set(relative_times(view, FAULTS).values()) == {1.0}


def test_a_batch_size_that_few_nodes_ran_is_left_out() -> None:
    view = {f"n{number}": StepWindow(1, "c", 1, {0: 100}, {0: 2000.0}) for number in range(6)}
    view["n0"] = StepWindow(1, "c", 1, {0: 100, 6: 1000}, {0: 2000.0, 6: 900_000.0})
    assert relative_times(view, FAULTS)["n0"] == 1.0


def test_a_slow_node_is_replaced_once_its_cell_is_drained() -> None:
    view = slow_cells(6, {"f3": (40.0,) * 5})
    opened, cordoned, wished = plan_faults(view, SETTINGS, NOW)
    assert isinstance(opened, OpenIncident)
    assert opened.summary == ("Node f3: slower than its cohort in 5 of 5 windows: score 0.50, robust z 34.1, 5 peers")
    assert isinstance(cordoned, CordonNode)
    assert isinstance(wished, RequestReplacement)
    assert {opened.node, cordoned.node, wished.node} == {"f3"}


def test_a_third_of_a_cohort_slow_is_a_common_cause_and_touches_no_hardware() -> None:
    view = slow_cells(8, {f"f{number}": (40.0,) * 5 for number in range(3)})
    assert {type(decision) for decision in plan_faults(view, SETTINGS, NOW)} == {OpenIncident}


@given(st.lists(st.floats(19.0, 21.0), min_size=6, max_size=12), st.floats(2.0, 1000.0))
def test_only_the_slow_one_is_ever_blamed_in_a_cohort_of_like_machines(steps_ms: list[float], factor: float) -> None:
    slow = {f"f{place}": (ms,) * 5 for place, ms in enumerate(steps_ms)}
    slow["f0"] = (steps_ms[0] * factor,) * 5
    assert found(slow_cells(len(steps_ms), slow)) == ["f0"]


OLDER: dict[str, Any] = {"generation": 2}
LOOKS = st.lists(
    st.tuples(st.integers(5, 7), st.sampled_from([20.0, 28.0, 40.0]), st.sampled_from([{}, OLDER])), max_size=8
)


@given(LOOKS)
def test_what_was_compared_before_decides_nothing(looks: list[tuple[int, float, dict[str, Any]]]) -> None:
    for count, step_ms, changes in looks:
        view = slow_cells(count, {"f3": (step_ms,) * 5}, **changes)
        is_slow = count > FAULTS.slow_peers and step_ms > 28.0 and not changes
        assert found(view) == found(view) == (["f3"] if is_slow else [])
        assert find_slow(view, replace(FAULTS, slow_score=0.1)) == ()


HOT = {"nvidia 3": DeviceWindow(0.51, {"hw_thermal_slowdown": 0.92, "hw_slowdown": 0.4})}
CAPPED = {"nvidia 3": DeviceWindow(0.55, {})}


def with_clocks(node: str, *devices: Mapping[str, DeviceWindow], cells: int = 1, **slow: Any) -> FleetView:
    """One node with these devices in its recent windows. All ranks are steady."""
    view = slow_cells(cells, slow)
    known = dict(view.faults.windows)
    recent = zip(known[node], devices, strict=True)
    known[node] = tuple(replace(window, devices=seen) for window, seen in recent)
    return replace(view, faults=replace(view.faults, windows=known))


def test_a_hot_device_makes_its_node_slow_without_a_cohort() -> None:
    view = with_clocks("f0", HOT, {}, HOT, HOT, {})
    (slow,) = find_slow(view, FAULTS)
    assert (slow.node, slow.slow) == ("f0", ())
    assert slow.reason == (
        "nvidia 3 ran at 51% of its clock in 3 of 5 windows, hw_thermal_slowdown: "
        "it is so hot that its hardware halves the clock or more"
    )
    opened = next(each for each in plan(view) if isinstance(each, OpenIncident))
    assert (opened.kind, opened.subject) == (IncidentKind.SLOW, "f0")
    first = opened.evidence["throttled"][0]
    assert (first["device"], first["clock_percent"], first["why"]) == ("nvidia 3", 51, "hw_thermal_slowdown")


@pytest.mark.parametrize(
    "devices",
    [
        [HOT, HOT, {}, {}, {}],
        [CAPPED] * 5,
        [{"nvidia 3": DeviceWindow(0.51, {"hw_thermal_slowdown": 0.4})}] * 5,
        [{"nvidia 3": DeviceWindow(0.9, {"hw_thermal_slowdown": 1.0})}] * 5,
        [{f"nvidia {number}": HOT["nvidia 3"]} for number in range(5)],
    ],
    ids=["two windows", "a power cap", "short", "nearly at full clock", "another device each time"],
)
def test_a_device_that_is_limited_normally_or_shortly_blames_nobody(devices: list[Any]) -> None:
    assert find_slow(with_clocks("f0", *devices), FAULTS) == ()


def test_a_slow_rank_with_a_hot_device_states_both() -> None:
    (slow,) = find_slow(with_clocks("f2", *[HOT] * 5, cells=6, f2=(40.0,) * 5), FAULTS)
    assert slow.reason.startswith("slower than its cohort in 5 of 5 windows: score 0.50")
    assert "; nvidia 3 ran at 51% of its clock in 5 of 5 windows, hw_thermal_slowdown" in slow.reason


def test_a_hot_hall_is_a_common_cause_and_blames_no_machine() -> None:
    view = slow_cells(4, {})
    known = {
        node: tuple(replace(window, devices=HOT) for window in windows) if node[0] == "f" else windows
        for node, windows in view.faults.windows.items()
    }
    decisions = plan(replace(view, faults=replace(view.faults, windows=known)))
    assert IncidentKind.COMMON_CAUSE in {each.kind for each in decisions if isinstance(each, OpenIncident)}
    assert not [each for each in decisions if isinstance(each, CordonNode | RequestReplacement)]
