"""When the requests of a workload are due: the same for the same seed, and at the rate that was asked for."""

from itertools import islice, pairwise

import pytest

from models_registry.planning.workload import parse_workload
from models_registry.services.workload_requests import STRETCH, requests


def due(text: str, rate: float = 4.0, seed: int = 0, count: int = 3 * STRETCH) -> list[float]:
    return [request.due_s for request in islice(requests(parse_workload(text), rate, seed), count)]


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert due("100+10") == due("100+10")
    assert due("100+10") != due("100+10", seed=1)


def test_poisson_arrivals_have_their_rate_in_every_stretch_and_gaps_of_all_lengths() -> None:
    times = due("100+10")
    for number in range(1, 4):
        assert times[number * STRETCH - 1] == pytest.approx(number * STRETCH / 4.0)
    gaps = [then - now for now, then in pairwise(times)]
    assert min(gaps) < 0.01, "a quarter of a second is the mean"
    assert max(gaps) > 1.0
    longer = sum(gap > 0.25 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(0.368, rel=0.3), "1/e of exponential gaps exceed their mean"


def test_a_rate_twice_as_high_is_the_same_in_half_of_the_time() -> None:
    assert due("100+10", rate=8.0) == pytest.approx([at_s / 2 for at_s in due("100+10")])


def test_even_arrivals_are_even() -> None:
    assert due("100+10,arrival=uniform", count=4) == [0.25, 0.5, 0.75, 1.0]


def test_a_trace_keeps_its_own_gaps_unless_it_is_told_otherwise() -> None:
    recorded, even = due("azure,longest=4096", count=50), due("azure,longest=4096,arrival=uniform", count=50)
    assert len({round(then - now, 6) for now, then in pairwise(recorded)}) > 10
    assert {round(then - now, 6) for now, then in pairwise(even)} == {0.25}
