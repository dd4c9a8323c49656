"""A real benchmark against a real `sim` engine: points are stored permanently, another process continues, and failures
have a reason.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
from django.db import connection
from django.db.utils import DatabaseError

from kernel.models import Event
from kernel.refusals import Conflict
from models_registry.benchmarks import selectors as benchmark_target
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
from models_registry.benchmarks.planning.measurements import Machines
from models_registry.benchmarks.selectors import BenchmarkTarget, Entrance
from models_registry.benchmarks.services.benchmark import BenchmarkRequest, benchmark_cancel, benchmark_start
from models_registry.benchmarks.services.runner import BenchmarkRunner
from tests.engine_agent.engines.sim.cells import DEADLINE_S, MODEL, Member, running_cell
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

SHORT = {"min_s": 1, "min_requests": 20, "p99_times": 0, "warm_up_min_s": 0, "most_s": 5, "most_points": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """Steps of 20 ms: 8 tokens take 0.16 s."""
    options = ("--max-num-seqs", "4", "--decode-step-ms", "20", "--step-jitter", "0")
    with running_cell(tmp_path_factory.mktemp("cell"), 0, *options) as (member,):
        yield member


@pytest.fixture
def target(engine: Member, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fleet as benchmarks see it; tests change it."""
    row = rows.version()
    port = int(engine.url.rpartition(":")[2])
    described = BenchmarkTarget(
        "sim-70b", "us-east-1", row.pk, "local.cpu", "f1", ("c-1#3",), Machines(1, 2, 100.0, 3.6), 0
    )
    told: dict[str, Any] = {"target": described, "entrance": Entrance("127.0.0.1", port, MODEL), "version": row}
    monkeypatch.setattr(benchmark_target._traffic, "describe", lambda deployment, region: told["target"])
    monkeypatch.setattr(benchmark_target._traffic, "enter", lambda deployment, region: told["entrance"])
    return told


def asked(told: dict[str, Any], **fields: Any) -> Benchmark:
    request = BenchmarkRequest(told["version"], "sim-70b", "40+8", "ttft=2000,itl=40", rules=SHORT, **fields)
    return benchmark_start(request, actor="ada", now=NOW)


def steps(most: int = 20) -> None:
    """One process after another does one step, until none is left."""

    async def run() -> None:
        runner = BenchmarkRunner()
        for _ in range(most):
            if not await runner.step():
                return

    asyncio.run(run())


def test_the_goodput_is_found_and_stays_as_it_was_measured(target: dict[str, Any]) -> None:
    row = asked(target, first_rate=8.0)
    steps()
    row.refresh_from_db()
    assert (row.state, row.fingerprint, row.cells, row.chips) == ("done", "f1", 1, 2)
    assert row.goodput is not None
    assert 8.0 <= row.goodput <= 32.0, "four places of 0.16 s carry 25 requests a second"
    assert row.key != row.conditions
    assert row.statistics == {
        "requests": 2000, "prompt_tokens_mean": 40.0, "output_tokens_mean": 8.0, "repeated_share": 0.0
    }  # fmt: skip
    points = list(row.points.order_by("number"))
    assert [point.number for point in points] == list(range(1, len(points) + 1))
    held = next(point for point in points if point.rate == row.goodput)
    assert held.figures["failed"] == 0
    assert held.figures["prompt_tokens"] == 40 * held.figures["requests"], "the engine counts what the workload says"
    assert held.figures["joules_per_token"] == pytest.approx(100 / held.figures["tokens_per_s"])
    assert held.figures["ttft_p50_ms"] >= 20
    assert held.figures["cached_share"] == 0, "no point repeats a prompt of another"
    assert sum(held.histograms["ttft"].values()) == held.figures["requests"]
    assert Event.objects.filter(kind="benchmark.done", deployment="sim-70b").count() == 1
    with pytest.raises(DatabaseError, match="never changed"):
        BenchmarkPoint.objects.filter(pk=held.pk).update(rate=99)
    with pytest.raises(DatabaseError, match="never changed"):
        Benchmark.objects.filter(pk=row.pk).update(goodput=99)


def test_another_process_goes_on_with_what_is_stored(target: dict[str, Any]) -> None:
    row = asked(target, first_rate=8.0)
    steps(2)
    assert row.points.count() == 1
    first = row.points.get().measured_at
    steps()
    row.refresh_from_db()
    assert row.state == "done"
    assert row.points.order_by("number")[0].measured_at == first


def test_where_to_begin_is_known_from_one_request_alone(target: dict[str, Any]) -> None:
    row = asked(target)
    steps(2)
    row.refresh_from_db()
    assert row.first_rate is not None
    assert 4 <= row.first_rate <= 64


def test_a_cancelled_one_ends_in_the_middle_of_a_point(target: dict[str, Any]) -> None:
    row = asked(target, first_rate=1.0)

    async def run() -> None:
        runner = BenchmarkRunner()
        await runner.step()
        going = asyncio.create_task(runner.step())
        await asyncio.to_thread(_cancel_once_measured, row)
        await going

    asyncio.run(run())
    row.refresh_from_db()
    assert (row.state, row.reason, row.points.count()) == ("cancelled", "cancelled by ada", 0)
    with pytest.raises(Conflict, match="cancelled"):
        benchmark_cancel(benchmark_id=row.pk, actor="ada", now=NOW)


def _cancel_once_measured(row: Benchmark) -> None:
    ends_s = monotonic() + DEADLINE_S
    try:
        while not Benchmark.objects.get(pk=row.pk).progress and monotonic() < ends_s:
            sleep(0.02)
        benchmark_cancel(benchmark_id=row.pk, actor="ada", now=NOW)
    finally:
        connection.close()


def test_what_changes_meanwhile_ends_it(target: dict[str, Any]) -> None:
    row = asked(target, first_rate=8.0)
    steps(1)
    target["target"] = replace(target["target"], fingerprint="f2")
    steps()
    row.refresh_from_db()
    assert row.state == "failed"
    assert "have changed since the start" in row.reason


def test_cells_that_serve_others_are_left_alone(target: dict[str, Any]) -> None:
    target["target"] = replace(target["target"], in_flight=3)
    row = asked(target)
    steps()
    row.refresh_from_db()
    assert (row.state, "serves 3 requests" in row.reason) == ("failed", True)


def test_an_entrance_that_refuses_says_so_at_once(target: dict[str, Any]) -> None:
    target["entrance"] = replace(target["entrance"], model="another")
    row = asked(target)
    steps()
    row.refresh_from_db()
    assert row.state == "failed"
    assert row.reason.startswith("a single request got status 404")
    target["entrance"] = replace(target["entrance"], port=9)
    nowhere = asked(target)
    steps()
    nowhere.refresh_from_db()
    assert (nowhere.state, "status none" in nowhere.reason) == ("failed", True)
