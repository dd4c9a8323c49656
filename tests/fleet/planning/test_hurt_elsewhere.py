"""What users of other systems were hurt by, as far as it needs a rollout or a node that comes back; what only looks bad
is in `test_harmless.py`. The whole list, with its scenarios: `tests/simulator/test_hurt_elsewhere.py`.
"""

import pytest

from fleet.planning.decisions import MoveNode
from fleet.planning.planners import PLANNERS
from fleet.planning.policy import UpdatePolicy
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import CellState, NodeState, RolloutState
from tests.fleet.planning.fleets import NOW, SETTINGS, ago, cell, fleet, member
from tests.fleet.planning.world import NEW, OLD, Behaviour, World, rolling_out

POLICY = UpdatePolicy(min_healthy_s=3, canary_bake_s=4, bake_s=4, progress_deadline_s=60)
CELLS = {"east": 3, "west": 2}


def versions(world: World) -> list[str]:
    return sorted(cell.version for cell in world.cells(CellState.READY))


def rolled_back_after(behaviour: Behaviour) -> World:
    """A rollout to such a version; at every moment no more than one of the old cells may be away."""
    world = rolling_out(CELLS, POLICY, behaviour=behaviour)
    for _ in range(300):
        world.tick()
        assert len(world.cells(CellState.READY, OLD)) >= 4
        if world.outcome is not None:
            break
    world.run(30)
    return world


def test_a_new_version_that_becomes_ready_and_then_fails_touches_one_cell_and_goes_back() -> None:
    world = rolled_back_after(Behaviour.FAILS_LATER)
    assert world.outcome is RolloutState.ROLLED_BACK
    assert (len(world.touched), versions(world)) == (1, [OLD] * 5)


def test_a_version_that_never_starts_leaves_the_healthy_cells_serving() -> None:
    world = rolled_back_after(Behaviour.CRASHES)
    assert world.outcome is RolloutState.ROLLED_BACK
    assert (len(world.touched), versions(world)) == (1, [OLD] * 5)


def test_a_rollout_without_any_spare_ends_on_the_machines_that_there_are() -> None:
    world = rolling_out(CELLS, POLICY)
    world.sold_out, machines = True, set(world.fleet.nodes)
    world.run(400, until=RolloutState.SUCCEEDED)
    assert (world.outcome, versions(world)) == (RolloutState.SUCCEEDED, [NEW] * 5)
    assert set(world.fleet.nodes) == machines


@pytest.mark.parametrize("moment", [0, 20])
def test_a_rollout_and_a_scale_up_at_once_both_come_to_their_end(moment: int) -> None:
    world = rolling_out(CELLS, POLICY)
    world.run(moment)
    world.scale({"east": 4, "west": 3})
    world.run(600, until=RolloutState.SUCCEEDED)
    world.run(30)
    assert versions(world) == [NEW] * 7


@pytest.mark.parametrize("verdict", [ProviderStatus.GONE, ProviderStatus.UNKNOWN])
def test_a_stale_verdict_does_nothing_to_a_node_that_came_back(verdict: ProviderStatus) -> None:
    """It was suspect, its provider called it gone; its reports are here again."""
    back = member("f", state=NodeState.SUSPECT, state_since=ago(20), provider=verdict)
    view = fleet(member("l"), back, cell("c1", "l", "f"))
    decided = next(found for planner in PLANNERS if (found := planner(view, SETTINGS, NOW)))
    assert [(move.node, move.to) for move in decided if isinstance(move, MoveNode)] == [("f", NodeState.READY)]
    assert len(decided) == 1
