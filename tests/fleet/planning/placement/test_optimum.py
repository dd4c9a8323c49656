"""The total network distance of what is placed, against the exact optimum of small cases."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.planning.placement.distance import Path, total_distance
from fleet.planning.placement.planner import Placed, Placement, PlacementRequest
from tests.fleet.planning.fleets import KIND, fleet, node
from tests.fleet.planning.placement.exact_packing import smallest_distance

DEPTH = 3
WITHIN = 1.02

places = st.tuples(st.sampled_from("ab"), st.sampled_from("ab"), st.sampled_from("abc"))
machines = st.lists(
    st.one_of(places, places, st.tuples(st.sampled_from("ab"), st.just("a"), st.just("a"))), max_size=12
)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def placed(topologies: list[Path], wanted: list[int]) -> list[Placed]:
    view = fleet(*(node(f"n{index:02d}", topology=path) for index, path in enumerate(topologies)), wanted=0)
    orders = [PlacementRequest(f"c{index}", "llama", "east", KIND, size) for index, size in enumerate(wanted)]
    return [answer for answer in Placement(view).place(orders).values() if isinstance(answer, Placed)]


def that_fit(topologies: list[Path], wanted: list[int]) -> list[int]:
    while sum(wanted) > len(topologies):
        wanted = wanted[:-1]
    return wanted


@pytest.mark.slow
@given(topologies=machines, wanted=sizes)
@example(topologies=[("a", "a", x) for x in "aabbcccd"], wanted=[4, 3])
@example(topologies=[tuple(path) for path in ("aaa", "aab", "aba", "abb", "baa", "bab", "bba")], wanted=[3, 2, 2])
def test_random_small_cases_are_within_two_percent_of_the_exact_optimum(
    topologies: list[Path], wanted: list[int]
) -> None:
    wanted = that_fit(topologies, wanted)
    cells = placed(topologies, wanted)
    assert sorted(len(cell.nodes) for cell in cells) == sorted(wanted)
    taken = Counter(member.id for cell in cells for member in cell.nodes)
    assert not taken or max(taken.values()) == 1
    found = total_distance([[member.topology for member in cell.nodes] for cell in cells], DEPTH)
    assert found <= WITHIN * smallest_distance(topologies, wanted, DEPTH)
