"""Properties over random fleets: whatever breaks, the same planners bring every wanted cell back, and break no rule."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.planning.faults.liveness import nodes_in_doubt, plan_liveness
from fleet.planning.reconcile.cell_health import plan_health
from fleet.planning.reconcile.planner import plan_reconcile
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import CellState
from tests.fleet.planning.fleets import NOW, SETTINGS
from tests.fleet.planning.world import World


@settings(max_examples=30, deadline=None)
@given(
    wanted=st.integers(1, 3),
    nodes_per_cell=st.integers(1, 3),
    warm=st.integers(0, 2),
    kills=st.lists(st.tuples(st.integers(3, 40), st.integers(0, 9)), max_size=5),
)
def test_every_wanted_cell_comes_back_after_any_nodes_die(
    wanted: int, nodes_per_cell: int, warm: int, kills: list[tuple[int, int]]
) -> None:
    world = World(wanted=wanted, nodes_per_cell=nodes_per_cell, warm=warm)
    for tick in range(120):
        world.now = NOW + timedelta(seconds=tick)
        for _, index in (kill for kill in kills if kill[0] == tick):
            world.kill(index)
        world.agents_act()
        _pass(world)
        world.check_rules()
    ready = [cell for cell in world.fleet.cells.values() if cell.state is CellState.READY]
    assert len(ready) == wanted
    assert world.spare_count() == warm


def _pass(world: World) -> None:
    for _ in range(6):
        view = world.fleet
        gone = {n: ProviderStatus.GONE for n in nodes_in_doubt(view, SETTINGS, world.now) if n in world.dead}
        nodes = {name: replace(node, provider=gone.get(name, node.provider)) for name, node in view.nodes.items()}
        view = replace(view, nodes=nodes)
        for planner in (plan_liveness, plan_health, plan_reconcile):
            decisions = planner(view, SETTINGS, world.now)
            for decision in decisions:
                world.apply(decision)
            if decisions:
                break
        else:
            return
