"""The Pareto set holds what nothing else beats in both numbers."""

from hypothesis import given
from hypothesis import strategies as st

from models_registry.planning.best_configuration import pareto_set

POINTS = st.dictionaries(st.integers(0, 99), st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=30)


def test_what_is_beaten_in_both_is_left_out() -> None:
    assert pareto_set({1: (9, 1), 2: (5, 5), 3: (4, 4), 4: (1, 9), 5: (5, 2)}) == {1, 2, 4}
    assert pareto_set({}) == frozenset()


@given(POINTS)
def test_nothing_in_it_is_beaten_and_all_else_is(points: dict[int, tuple[float, float]]) -> None:
    front = pareto_set(points)
    for name, (first, second) in points.items():
        beaten = any(a >= first and b >= second and (a, b) != (first, second) for a, b in points.values())
        assert (name in front) <= (not beaten)
        if name not in front:
            assert any(points[other][0] >= first and points[other][1] >= second for other in front)
