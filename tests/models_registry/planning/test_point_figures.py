"""What requests of a point say together."""

import pytest

from models_registry.planning.point_figures import Machines, Sample, point_figures
from models_registry.planning.workload import Slo

SLO, MACHINES = Slo(1.0, 0.2), Machines(2, 2, 0.0, 0.0)


def test_requests_at_once_are_those_of_a_steady_load_however_short_the_point() -> None:
    """Two a second of which each takes 6 s are twelve at once, though only sixteen of them were looked at."""
    samples = [Sample(at / 2, at / 2, at / 2 + 0.5, at / 2 + 6.0, 200, 500, 50) for at in range(16)]
    figures = point_figures(samples, 8.0, SLO, MACHINES)
    assert figures["concurrency"] == pytest.approx(12.0)
    assert figures["goodput_per_s"] == pytest.approx(2.0)
    assert figures["tokens_per_s"] == pytest.approx(16 * 50 / 13.5), "no token in a shorter time than it took"


def test_a_point_without_requests_says_nothing() -> None:
    figures = point_figures([], 0.0, SLO, MACHINES)
    assert (figures["concurrency"], figures["tokens_per_s"], figures["ttft_p99_ms"]) == (0.0, 0.0, None)
