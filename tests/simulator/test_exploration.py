"""Every state of a rollout over three cells is met, whatever is lost or late, and with crashes, repeated orders and
stalled writes: no invariant breaks, and from each a way leads to the end.

A crash and a stalled write together are 45,000 states: `python -m simulator.explore --stalls 1 --duplicates 0`.
"""

from collections.abc import Callable

import pytest

from simulator.exploration import Exploration, Mishaps
from simulator.explore import main


@pytest.mark.parametrize(
    "mishaps",
    [
        pytest.param(Mishaps(crashes=1, duplicates=1, stalls=0), id="a crash and a repeated order"),
        pytest.param(Mishaps(crashes=0, duplicates=1, stalls=1), id="a repeated order and a stalled write"),
    ],
)
def test_no_state_breaks_an_invariant_or_has_no_way_out(mishaps: Mishaps, tell: Callable[[str], None]) -> None:
    found = Exploration(cells=3).explore(mishaps)
    tell(f"exploration: {found.told(mishaps)}")

    assert found.violations == []
    assert found.is_whole
    assert found.ends > 0
    assert found.stuck == 0


def test_an_exploration_that_is_cut_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--crashes", "1", "--duplicates", "0", "--most", "200"]) == 1
    assert "200 states with 1 crash (not all): 0 broken" in capsys.readouterr().out
