"""Properties over random fleets: whatever breaks, the same planners bring every wanted cell back, and break no rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.states import CellState
from tests.fleet.planning.fleets import fleet
from tests.fleet.planning.world import World


@pytest.mark.slow
@given(
    wanted=st.integers(1, 3),
    nodes_per_cell=st.integers(1, 3),
    warm=st.integers(0, 2),
    kills=st.lists(st.tuples(st.integers(3, 40), st.integers(0, 9)), max_size=5),
)
def test_every_wanted_cell_comes_back_after_any_nodes_die(
    wanted: int, nodes_per_cell: int, warm: int, kills: list[tuple[int, int]]
) -> None:
    world = World(fleet(wanted=wanted, nodes_per_cell=nodes_per_cell, warm=warm))
    for tick in range(120):
        for _, index in (kill for kill in kills if kill[0] == tick):
            world.kill(index)
        world.tick()
        world.check_rules()
    assert len(world.cells(CellState.READY)) == wanted
    assert world.spare_count() == warm
