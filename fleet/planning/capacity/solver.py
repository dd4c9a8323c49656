"""Asks HiGHS, which scipy carries, for the least of a program. On one thread: the same program has the same answer.

HiGHS reads a clock for its limit. What it had not answered by then is thrown away, so a limit decides between two
answers that are each always the same.
"""

from dataclasses import dataclass

from fleet.planning.capacity.arrays import Array
from fleet.planning.capacity.program import Program

GAP = 1e-3
"""Whole numbers within a thousandth of the least will do."""
SOLVED = 0
"""`scipy.optimize.milp`'s status."""


@dataclass(frozen=True)
class Solution:
    """`values` None: there is none, for the reason in `why`."""

    values: Array | None
    why: str = ""


def solve(program: Program, *, limit_s: float, whole: bool = False) -> Solution:
    """The least of a program; with `whole` its whole columns are whole numbers. What it is asked for takes a second to
    import."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        return Solution(None, f"scipy cannot be imported: {error}")
    shape = (len(program.row_lower), len(program.cost))
    matrix = csr_array((program.values, program.columns, program.starts), shape=shape)
    found = milp(
        program.cost,
        integrality=program.whole.astype(int) if whole else None,
        bounds=Bounds(program.lower, program.upper),
        constraints=LinearConstraint(matrix, program.row_lower, program.row_upper),
        options={"time_limit": limit_s, "mip_rel_gap": GAP},
    )
    if found.status != SOLVED:
        return Solution(None, f"HiGHS answered within {limit_s:g} s: {found.message}")
    return Solution(found.x)
