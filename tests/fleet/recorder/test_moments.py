"""The fleet at any time, from recorded rounds, equals what a recording of all states showed then."""

from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest

from fleet.reconcile.planning.planner import PLANNERS, Planner
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.recorder.planning.moments import fleet_at
from tests.fleet.fleets import NOW, ago, cell, fleet, node
from tests.fleet.world import World

States = dict[str, tuple[Any, ...]]


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
    for at in random.sample(sorted(seen), 20):
        before = next((view for now, view in reversed(recorded) if now <= at), None)
        after = next((view for now, view in recorded if now > at), world.fleet)
        then = fleet_at(before, after, at)
        assert states_of(then.cells, then.nodes) == seen[at], f"seed {seed}, at {at}"


def test_what_an_operator_changed_later_is_shown_as_it_was_before() -> None:
    before = fleet(node("a"), cell("c1", "a", state_since=ago(50)), cell("c2", state_since=ago(40)))
    after = fleet(node("a"), cell("c1", "a", state=CellState.DRAINING, state_since=ago(5)), cell("c2"), cell("c3"))
    then = fleet_at(before, after, NOW - timedelta(seconds=10))
    assert {one.id: one.state for one in then.cells} == dict.fromkeys(("c1", "c2", "c3"), CellState.READY)
    assert [(place.ready, place.wanted) for place in then.places()] == [(3, 1)]
    assert {one.state for one in then.nodes} == {NodeState.READY}


def test_what_did_not_exist_yet_is_not_shown() -> None:
    after = fleet(node("a", state_since=ago(5)), cell("c1", state_since=ago(5)))
    then = fleet_at(None, after, ago(10))
    assert (then.cells, then.nodes) == ((), ())
