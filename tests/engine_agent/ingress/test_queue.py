"""When every cell of a pool is full, requests wait: the urgent first, not for ever, and not without number."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from engine_agent.ingress.settings import QUEUES
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool


@pytest_asyncio.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    ingress = RunningIngress(tmp_path / "home")
    short = replace(QUEUES[ServingClass.REALTIME], wait_s=1, waiting_per_cell=3)
    ingress.use(replace(ingress.settings, queues={**QUEUES, ServingClass.REALTIME: short}))
    async with ingress.running() as running:
        yield running


def queued(ingress: RunningIngress) -> int:
    running = ingress.ingress.serving.running
    return sum(backend.queued for backend in running.backends) if running else 0


@pytest.mark.asyncio
async def test_a_full_pool_queues_then_refuses_and_a_wait_too_long_ends(impatient: RunningIngress) -> None:
    async with FakeCell(max_connections=2).running() as cell, impatient.client() as client:
        cell.release.clear()
        await impatient.route(pool(cell))
        await impatient.sees(**{cell.name: "up"})
        running = [asyncio.create_task(ask(client)) for _ in range(2)]
        await eventually(lambda: cell.in_flight == 2)
        waiting = [asyncio.create_task(ask(client)) for _ in range(6)]
        errors = list(await asyncio.gather(*waiting, return_exceptions=True))
        codes = sorted(error.code or "" for error in errors if isinstance(error, openai.InternalServerError))
        assert codes == ["no_free_cell"] * 4 + ["queue_full"] * 2
        assert {error.response.headers["retry-after"] for error in errors if isinstance(error, openai.APIStatusError)}
        assert len(cell.requests) == 2, "the cell never had more than its limit"
        cell.release.set()
        assert await asyncio.gather(*running) == [cell.name] * 2


@pytest.mark.asyncio
async def test_less_urgent_requests_wait_behind_urgent_ones(ingress: RunningIngress) -> None:
    async with FakeCell(max_connections=1).running() as cell, asyncio.TaskGroup() as group:
        cell.release.clear()
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for number, urgency in enumerate(("realtime", "batch", "near_realtime", "realtime")):
            body = b'{"model": "demo", "n": "%s"}' % urgency.encode()
            group.create_task(ingress.post(body, **{"X-Switchyard-Class": urgency}))
            await eventually(lambda number=number: len(cell.requests) + queued(ingress) == number + 1)  # type: ignore[misc]
        cell.release.set()
        await eventually(lambda: len(cell.requests) == 4)
    assert [request.json["n"] for request in cell.requests] == ["realtime", "realtime", "near_realtime", "batch"]


@pytest.mark.asyncio
async def test_batch_work_cannot_fill_the_queue_against_urgent_requests(impatient: RunningIngress) -> None:
    async with FakeCell(max_connections=1).running() as cell, asyncio.TaskGroup() as group:
        cell.release.clear()
        await impatient.route(pool(cell))
        await impatient.sees(**{cell.name: "up"})
        batch = [
            group.create_task(impatient.post(b'{"model": "demo"}', **{"X-Switchyard-Class": "batch"})) for _ in range(8)
        ]
        await eventually(lambda: sum(task.done() for task in batch) + queued(impatient) == len(batch) - cell.in_flight)
        # HAProxy's threads count before they act, so each limit is one more where two of them ask at once.
        waiting, running = queued(impatient), cell.in_flight
        assert running in {1, 2}
        assert waiting in {2, 3}, "half of 3, rounded down, and one more"
        assert next(task for task in batch if task.done()).result().json()["error"]["code"] == "queue_full"
        urgent = group.create_task(impatient.post(b'{"model": "demo", "n": "urgent"}'))
        await eventually(lambda: queued(impatient) == waiting + 1)
        cell.release.set()
        assert (await urgent).status_code == 200
    assert cell.requests[running].json.get("n") == "urgent"


@pytest.mark.asyncio
async def test_a_client_that_leaves_gives_its_place_back(ingress: RunningIngress) -> None:
    async with FakeCell(max_connections=1).running() as cell, ingress.client() as client:
        cell.release.clear()
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        running = asyncio.create_task(ask(client))
        await eventually(lambda: cell.in_flight == 1)
        leaves = asyncio.create_task(ask(client))
        await eventually(lambda: queued(ingress) == 1)
        leaves.cancel()
        await eventually(lambda: queued(ingress) == 0)
        cell.release.set()
        assert await running == cell.name
        assert len(cell.requests) == 1
