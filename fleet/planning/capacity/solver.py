"""Solves a program with HiGHS, on one thread, so that the same program has the same solution.

HiGHS reads a clock for its time limit. A solution that is not proved by then is thrown away, so the limit decides
between two plans that are each always the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fleet.planning.capacity.arrays import Array
from fleet.planning.capacity.program import Program

if TYPE_CHECKING:
    import highspy

GAP = 1e-3
"""A solution in whole numbers within a thousandth of the optimum will do."""


@dataclass(frozen=True)
class Solution:
    """`values` None: there is none, for the reason in `why`."""

    values: Array | None
    why: str = ""


def solve(program: Program, *, limit_s: float, whole: bool = False) -> Solution:
    """The least of a program; with `whole` its whole columns are whole numbers."""
    try:
        import highspy
    except ImportError as error:
        return Solution(None, f"highspy cannot be imported: {error}")
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "time_limit": limit_s, "mip_rel_gap": GAP}
    for option, value in options.items():
        highs.setOptionValue(option, value)
    highs.passModel(_model(program, whole))
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return Solution(None, f"HiGHS answered within {limit_s:g} s: {highs.modelStatusToString(status)}")
    return Solution(np.array(highs.getSolution().col_value))


def _model(program: Program, whole: bool) -> "highspy.HighsLp":
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = (
        program.starts, program.columns, program.values
    )  # fmt: skip
    if whole:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[int(is_whole)] for is_whole in program.whole]
    return model
