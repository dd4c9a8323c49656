"""What became of a decision: how many cell-seconds it had too few or too many, by the load that came. Pure.

Measured while the decision stands, by what is needed at each look, against what it wanted; in shadow, too. The cells
in force are counted beside it, so that shadow can be compared with what really was.
"""

from dataclasses import dataclass

LOOK_MOST_S = 30.0
"""A longer time without a look counts for so much: nobody saw what was needed meanwhile."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Cell-seconds, but for `observed_s`. What a range's end forbade is no regret: the need is taken within it."""

    observed_s: float = 0.0
    too_few_cell_s: float = 0.0
    too_many_cell_s: float = 0.0
    in_force_cell_s: float = 0.0


def regret_after(before: Regret, *, wanted: int, needed: int, in_force: int, passed_s: float) -> Regret:
    """With `passed_s` seconds more, in which so many cells were wanted, needed and in force."""
    seconds = min(max(0.0, passed_s), LOOK_MOST_S)
    return Regret(
        before.observed_s + seconds,
        before.too_few_cell_s + max(0, needed - wanted) * seconds,
        before.too_many_cell_s + max(0, wanted - needed) * seconds,
        before.in_force_cell_s + in_force * seconds,
    )
