"""Every state of a rollout over three cells is visited, with lost and late messages, crashes, repeated orders and
stalled writes: no invariant breaks, and each state can reach an end.

A crash and a stalled write together are 45,000 states: `python -m simulator.model_checker --stalls 1 --duplicates 0`.
"""

from collections.abc import Callable

import pytest

from simulator.model_checker.__main__ import main
from simulator.model_checker.model import Model, search
from simulator.model_checker.state import FaultBudget


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(FaultBudget(crashes=1, duplicates=1, stalls=0), id="a crash and a repeated order"),
        pytest.param(FaultBudget(crashes=0, duplicates=1, stalls=1), id="a repeated order and a stalled write"),
    ],
)
def test_no_state_breaks_an_invariant_or_has_no_way_out(budget: FaultBudget, tell: Callable[[str], None]) -> None:
    result = search(Model(cells=3), budget)
    tell(f"model checker: {result.summary(budget)}")

    assert result.violations == []
    assert result.is_complete
    assert result.ends > 0
    assert result.stuck == 0


def test_an_exploration_that_is_cut_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--crashes", "1", "--duplicates", "0", "--most", "200"]) == 1
    assert "200 states with 1 crash (not all): 0 broken" in capsys.readouterr().out
