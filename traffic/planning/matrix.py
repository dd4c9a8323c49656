"""Arithmetic of traffic matrices: origin region -> serving region -> share of the origin's requests. Pure.

It knows shares, loads and distances, and nothing of why a share is what it is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated

import msgspec

Row = Mapping[str, float]
Matrix = Mapping[str, Row]

SHARE_DIGITS = 4
"""Shares are kept in hundredths of a point; ingresses draw in tenths of one."""
_UNITS = 10**SHARE_DIGITS


class BadMatrix(ValueError):
    """What is stored as shares are none."""


def read_matrix(stored: object) -> Matrix:
    """Stored shares.

    Raises:
        BadMatrix: they are no rows of shares from 0 to 1.
    """
    try:
        return msgspec.convert(stored, dict[str, dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]]])
    except msgspec.ValidationError as error:
        raise BadMatrix(str(error)) from None


def whole_row(row: Row, home: str) -> dict[str, float]:
    """The same row in hundredths of a point, summing to exactly 1 as such; what rounding leaves over stays at home.

    Raises:
        ValueError: no share is above 0.
    """
    total = math.fsum(share for share in row.values() if share > 0)
    if total <= 0:
        raise ValueError(f"the row of {home} has no share above 0: {dict(row)}")
    units = {region: int(share / total * _UNITS + 1e-6) for region, share in sorted(row.items()) if share > 0}
    keeper = home if row.get(home, 0) > 0 else max(units, key=lambda region: (units[region], region))
    units[keeper] += _UNITS - sum(units.values())
    return {region: count / _UNITS for region, count in units.items() if count > 0}


def distance(row: Row, other: Row) -> float:
    """Total variation: the share of requests that go elsewhere when one row takes the other's place, 0 to 1."""
    return math.fsum(abs(row.get(region, 0.0) - other.get(region, 0.0)) for region in {*row, *other}) / 2


def movement(before: Matrix, after: Matrix, demand: Mapping[str, float]) -> float:
    """The share of all requests that go to another region than before. Origins that had no row moved nothing."""
    total = math.fsum(demand.get(origin, 0.0) for origin in after)
    moved = math.fsum(
        demand.get(origin, 0.0) * distance(before[origin], row) for origin, row in after.items() if origin in before
    )
    return moved / total if total > 0 else 0.0


def loads(matrix: Matrix, demand: Mapping[str, float]) -> dict[str, float]:
    """What each region serves under a matrix, in the unit of the demand."""
    served: dict[str, float] = defaultdict(float)
    for origin, row in matrix.items():
        for region, share in row.items():
            served[region] += share * demand.get(origin, 0.0)
    return dict(served)


def step_towards(row: Row, target: Row, step: float, home: str) -> dict[str, float]:
    """The row moved towards the target by at most `step` (in total variation), in equal steps if it takes several.

    Rounding may make them one more than exact shares would take.
    """
    steps = math.ceil(distance(row, target) / step - 1e-9)
    part = 1 / max(1, steps)
    blend = {name: (1 - part) * row.get(name, 0.0) + part * target.get(name, 0.0) for name in {*row, *target}}
    return whole_row(blend, home)
