"""Every state of a rollout over three cells is met: no invariant breaks, and from each a way leads to the end."""

import pytest

from fleet.simulator.exploration import Exploration, Mishaps


@pytest.mark.parametrize(
    ("cells", "mishaps"),
    [
        (3, Mishaps(crashes=0, duplicates=1, stalls=0)),
        (3, Mishaps(crashes=0, duplicates=0, stalls=1)),
        (3, Mishaps(crashes=1, duplicates=0, stalls=0)),
    ],
)
def test_no_state_breaks_an_invariant_or_has_no_way_out(cells: int, mishaps: Mishaps) -> None:
    found = Exploration(cells).explore(mishaps)

    assert found.violations == []
    assert found.is_whole
    assert found.ends > 0
    assert found.stuck == 0


def test_an_exploration_that_is_cut_short_says_so() -> None:
    found = Exploration(3).explore(Mishaps(crashes=1, duplicates=0, stalls=0), most=200)

    assert not found.is_whole
    assert found.states == 200
