"""A point counts each request that was due in it, however long that takes; its engine answers as the test says."""

import asyncio
from typing import Any

import pytest

from models_registry.planning.goodput import GoodputRules, PointVerdict
from models_registry.planning.point_figures import Sample
from models_registry.planning.workload import Slo
from models_registry.services import point_load
from models_registry.services.load_client import LoadTarget
from models_registry.services.point_load import Progress, measure_point

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
