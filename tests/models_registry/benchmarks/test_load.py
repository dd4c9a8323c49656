"""Requests of a workload are due at the same times for the same seed and at the requested rate. A point counts each
request due in it, however long it takes; the test plays the engine.
"""

import asyncio
from itertools import islice, pairwise
from typing import Any

import pytest

from models_registry.benchmarks.planning.goodput import GoodputRules, PointVerdict
from models_registry.benchmarks.planning.measurements import Sample
from models_registry.benchmarks.planning.workload import Slo, parse_workload
from models_registry.benchmarks.services import load as point_load
from models_registry.benchmarks.services.load import LoadTarget, Progress, measure_point
from models_registry.benchmarks.services.runner import STRETCH, requests


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


RULES = GoodputRules(min_s=0.05, min_requests=1, p99_times=0, warm_up_min_s=0)
"""Shorter than the time between two looks."""


@pytest.mark.asyncio
async def test_a_point_waits_for_the_slow_ones_that_were_due_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    release, told = asyncio.Event(), list[Progress]()

    class Client:
        def __init__(self, *_: Any) -> None:
            pass

        async def complete(self, body: bytes, due_s: float) -> Sample:
            if body == b"slow":
                await release.wait()
            return Sample(due_s, due_s, due_s + 0.001, due_s + 0.002, 200, 10, 1)

        def close(self) -> None:
            pass

    async def tell(progress: Progress) -> None:
        told.append(progress)
        release.set()

    monkeypatch.setattr(point_load, "LoadClient", Client)
    offered = [(0.001 * number, b"slow" if number == 4 else b"quick", 1) for number in range(5)]
    later = [(1000.0, b"later", 1)]
    target, slo = LoadTarget("127.0.0.1", 1, "m"), Slo(60.0, 1.0)
    point = await measure_point(target, [*offered, *later], 100.0, slo, RULES, warm_s=0.0, tell=tell)
    assert [one.known for one in told] == [4], "its time was over, and one was not known"
    assert (point.judgement.requests, point.judgement.verdict) == (5, PointVerdict.HELD)
