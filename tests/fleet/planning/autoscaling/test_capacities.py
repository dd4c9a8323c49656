"""Cells that are not alike: a load is divided by what each of them carries."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.autoscaling.policy import ScalingMode, ScalingPolicy
from fleet.planning.autoscaling.view import PlaceLoad
from tests.fleet.planning.autoscaling.scaled import decide, place, view

TARGET = 0.7
POLICY = ScalingPolicy(mode=ScalingMode.ACT, target_utilisation=TARGET)


def test_a_load_is_divided_by_the_capacities_of_the_cells_as_they_stay_and_come() -> None:
    there = place(load=PlaceLoad(0.7 * 49), current=2, capacities=(32.0, 8.0, 8.0))
    decision = decide(view(there, policy=POLICY))
    assert decision.wanted == 4, "32 and 8 are there, and 9 more take two of 8"
    assert "take 4 cells at 70% of what each was tested for: 3 for 8 and 1 for 32" in decision.reason


def test_growth_is_counted_by_the_type_that_a_further_cell_would_be_of() -> None:
    for further, cells in ((8.0, 2 + 5), (40.0, 2 + 1)):
        there = place(load=PlaceLoad(0.7 * 80), current=2, capacities=(32.0, 8.0, further))
        assert decide(view(there, policy=POLICY)).wanted == cells


@given(st.floats(0.0, 500.0), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_so_many_cells_carry_the_load_and_one_fewer_does_not(load: float, capacities: list[int]) -> None:
    there = place(load=PlaceLoad(load), current=1, capacities=tuple(map(float, capacities)))
    needed = decide(view(there, policy=POLICY)).needed
    assert needed is not None

    def carried(cells: int) -> float:
        return TARGET * sum(capacities[min(at, len(capacities) - 1)] for at in range(cells))

    if 1 < needed < 20:
        assert carried(needed) >= load * (1 - 1e-6)
        assert carried(needed - 1) < load * (1 + 1e-6)


@given(st.floats(0.0, 300.0), st.integers(1, 64), st.integers(0, 12))
def test_equal_capacities_are_as_one_number(load: float, capacity: int, there: int) -> None:
    alike = place(load=PlaceLoad(load), capacities=(float(capacity),) * (there + 1))
    plain = place(load=PlaceLoad(load))
    found = decide(view(alike, policy=POLICY)).needed
    assert found == decide(view(plain, policy=POLICY, per_cell=float(capacity))).needed
    assert found is not None
    assert found >= min(20, math.floor(load / (TARGET * capacity)))
