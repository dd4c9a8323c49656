"""Figures of a point; goodput predicted from three steps; the Pareto set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.batching import ModelParameters
from models_registry.benchmarks.planning.measurements import (
    Machines,
    Sample,
    StepModel,
    pareto_set,
    point_figures,
)
from models_registry.benchmarks.planning.workload import Slo, Workload
from tests.models_registry.benchmarks.planning.virtual_cell import mean_field_knee

SLO, MACHINES = Slo(1.0, 0.2), Machines(2, 2, 0.0, 0.0)


def test_requests_at_once_are_those_of_a_steady_load_however_short_the_point() -> None:
    """Two requests per second of 6 s each are twelve concurrent ones, even if only sixteen were observed."""
    samples = [Sample(at / 2, at / 2, at / 2 + 0.5, at / 2 + 6.0, 200, 500, 50) for at in range(16)]
    figures = point_figures(samples, 8.0, SLO, MACHINES)
    assert figures["concurrency"] == pytest.approx(12.0)
    assert figures["goodput_per_s"] == pytest.approx(2.0)
    assert figures["tokens_per_s"] == pytest.approx(16 * 50 / 13.5), "no token in a shorter time than it took"


def test_a_point_without_requests_says_nothing() -> None:
    figures = point_figures([], 0.0, SLO, MACHINES)
    assert (figures["concurrency"], figures["tokens_per_s"], figures["ttft_p99_ms"]) == (0.0, 0.0, None)


TRUE = StepModel(0.020, 0.00025, 1 / 8000)


def test_predicted_goodput_is_near_that_of_the_simulated_engine() -> None:
    slo = Slo(3.0, 0.040)
    true = mean_field_knee(ModelParameters(), Workload("synthetic", 1000, 150), slo)
    predicted = TRUE.goodput(1000, 150, slo, 64)
    assert 0.7 * true < predicted < 1.3 * true


def test_no_rate_holds_where_an_empty_engine_is_too_slow() -> None:
    assert TRUE.goodput(1000, 150, Slo(3.0, 0.019), 64) == 0
    assert TRUE.goodput(100_000, 150, Slo(3.0, 0.1), 64) == 0


def test_few_places_bound_the_rate() -> None:
    slo = Slo(3.0, 0.5)
    assert TRUE.goodput(1000, 150, slo, 2) < TRUE.goodput(1000, 150, slo, 64)


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
