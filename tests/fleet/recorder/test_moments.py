"""The fleet at any time, from recorded rounds, equals what a recording of all states showed then."""

from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest

from fleet.reconcile.planning.planner import PLANNERS, Planner
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.recorder.planning.encoding import CannotDecode, encode_round, schema_of
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.loops import Round
from fleet.recorder.planning.moments import Moment
from fleet.recorder.planning.states_then import StatesThen, decode_states
from tests.fleet.fleets import NOW, ago, cell, fleet, node
from tests.fleet.world import World

States = dict[str, tuple[Any, ...]]


def as_recorded(*views: tuple[datetime, FleetView]) -> list[StatesThen]:
    """The states of snapshots that were recorded as one chain."""
    chain, before = [], None
    for now, view in views:
        chain.append(encode_round(Round(view, FleetSettings(), now, ()), before))
        before = view
    return list(decode_states(chain, schema_of(RECONCILER), [True] * len(chain)))


def states_of(cells: Any, nodes: Any) -> States:
    """What a page shows of cells and nodes."""
    shown: States = {one.id: (one.state, one.reason, one.generation, one.version, one.members) for one in cells}
    return shown | {one.id: (one.state, one.state_since, one.cordoned) for one in nodes}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 21))])
def test_every_moment_of_a_run_is_shown_as_it_was(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    recorded: list[tuple[datetime, FleetView]] = []

    def recording(planner: Planner) -> Planner:
        def plan(view: FleetView, settings: Any, now: datetime) -> Any:
            if decisions := planner(view, settings, now):
                recorded.append((now, view))
            return decisions

        return plan

    monkeypatch.setattr("tests.fleet.world.PLANNERS", tuple(map(recording, PLANNERS)))
    world = World(fleet(wanted=3, warm=2))
    seen: dict[datetime, States] = {}
    for _ in range(60):
        if random.random() < 0.1:
            world.kill(random.randrange(9))
        world.tick()
        live = world.fleet
        seen[world.now] = states_of(live.cells.values(), live.nodes.values())
    *decoded, present = as_recorded(*recorded, (world.now, world.fleet))
    states = [(now, states) for (now, _), states in zip(recorded, decoded, strict=True)]
    for at in random.sample(sorted(seen), 20):
        before = next((view for now, view in reversed(states) if now <= at), None)
        after = next((view for now, view in states if now > at), present)
        then = Moment(at, before, after)
        assert states_of(then.cells, then.nodes) == seen[at], f"seed {seed}, at {at}"


def test_what_an_operator_changed_later_is_shown_as_it_was_before() -> None:
    before = fleet(node("a"), cell("c1", "a", state_since=ago(50)), cell("c2", state_since=ago(40)))
    after = fleet(node("a"), cell("c1", "a", state=CellState.DRAINING, state_since=ago(5)), cell("c2"), cell("c3"))
    then = Moment(NOW - timedelta(seconds=10), *as_recorded((ago(20), before), (NOW, after)))
    assert {one.id: one.state for one in then.cells} == dict.fromkeys(("c1", "c2", "c3"), CellState.READY)
    assert [(place.ready, place.wanted) for place in then.places()] == [(3, 1)]
    assert {one.state for one in then.nodes} == {NodeState.READY}


def test_what_did_not_exist_yet_is_not_shown() -> None:
    after = fleet(node("a", state_since=ago(5)), cell("c1", state_since=ago(5)))
    then = Moment(ago(10), None, as_recorded((NOW, after))[0])
    assert (then.cells, then.nodes) == ((), ())


def test_states_follow_edits_and_skip_reports() -> None:
    first = fleet(node("a"), cell("c1", "a"), cell("c2"))
    second = fleet(node("a", state=NodeState.SUSPECT, cordoned=True), node("b"), cell("c2", "a", "b", reason="moved"))
    *_, then = as_recorded((ago(20), first), (ago(15), first), (ago(10), second))
    assert list(then.cells) == ["c2"]
    assert [member.node for member in then.cells["c2"].members] == ["a", "b"]
    assert then.cells["c2"].reason == "moved"
    assert (then.nodes["a"].state, then.nodes["a"].cordoned) == (NodeState.SUSPECT, True)
    assert list(then.nodes) == ["a", "b"]


def test_damaged_bytes_and_other_types_are_refused() -> None:
    with pytest.raises(CannotDecode, match="differ from those of this release"):
        list(decode_states([b""], "old", [True]))
    with pytest.raises(CannotDecode, match="row 1 of its chain is damaged"):
        list(decode_states([b"x"], schema_of(RECONCILER), [True]))
