"""Asks HiGHS for the least of a program. One thread and a fixed seed: the same program has the same answer.

HiGHS reads a clock for its limit. What it had not answered by then is thrown away, so a limit decides between two
answers that are each always the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fleet.planning.capacity.arrays import Array
from fleet.planning.capacity.program import Program

if TYPE_CHECKING:
    from highspy import HighsLp

OPTIONS = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 1e-3}
"""Whole numbers within a thousandth of the least will do."""


@dataclass(frozen=True)
class Solution:
    """`values` None: there is none, for the reason in `why`."""

    values: Array | None
    why: str = ""


def solve(program: Program, *, limit_s: float, whole: bool = False) -> Solution:
    """The least of a program; with `whole` its whole columns are whole numbers."""
    try:
        from highspy import HighsModelStatus
        from highspy._core import _Highs  # `Highs` around it prints a banner and subscribes to callbacks
    except ImportError:
        return Solution(None, "highspy is not installed")
    solver = _Highs()
    for name, value in OPTIONS.items():
        solver.setOptionValue(name, value)
    solver.setOptionValue("time_limit", float(limit_s))
    solver.passModel(_model(program, whole))
    solver.run()
    status = solver.getModelStatus()
    if status != HighsModelStatus.kOptimal:
        return Solution(None, f"HiGHS answered {solver.modelStatusToString(status)} (limit {limit_s:g} s)")
    return Solution(np.array(solver.getSolution().col_value))


def _model(program: Program, whole: bool) -> "HighsLp":
    from highspy import HighsLp, HighsVarType, MatrixFormat

    model = HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = model.num_col_, model.num_row_
    model.a_matrix_.start_, model.a_matrix_.index_ = program.starts, program.columns
    model.a_matrix_.value_ = program.values
    if whole:
        kinds = (HighsVarType.kContinuous, HighsVarType.kInteger)
        model.integrality_ = [kinds[int(one)] for one in program.whole]
    return model
