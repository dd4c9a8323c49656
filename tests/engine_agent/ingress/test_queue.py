"""When all cells of a pool are full, requests wait: urgent ones first, and with limits on time and number."""

import asyncio
import contextlib
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

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0
PATIENCE_S = 110
"""Shorter than the time limit of a test."""


@pytest_asyncio.fixture
async def patient(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    """Real-time requests wait as long as a test can take, three per cell."""
    async with with_queue(tmp_path, ServingClass.REALTIME, wait_s=PATIENCE_S, waiting_per_cell=3) as running:
        yield running


@pytest_asyncio.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with with_queue(tmp_path, ServingClass.REALTIME, wait_s=1) as running:
        yield running


@contextlib.asynccontextmanager
async def with_queue(folder: Path, serving_class: ServingClass, **limits: int) -> AsyncIterator[RunningIngress]:
    ingress = RunningIngress(folder / "home")
    changed = replace(QUEUES[serving_class], **limits)
    ingress.use(replace(ingress.settings, queues={**QUEUES, serving_class: changed}))
    async with ingress.running() as running:
        yield running


def queued(ingress: RunningIngress) -> int:
    running = ingress.ingress.serving.running
    return sum(backend.queued for backend in running.backends) if running else 0


@pytest.mark.asyncio
async def test_a_full_pool_queues_then_refuses(patient: RunningIngress) -> None:
    async with FakeCell(max_connections=2).running() as cell, patient.client() as client:
        cell.release.clear()
        await patient.route(pool(cell))
        await patient.sees(**{cell.name: "up"})
        served = [asyncio.create_task(ask(client)) for _ in range(2)]
        await eventually(lambda: cell.in_flight == 2, DEADLINE_S)
        # One by one: HAProxy's threads count before they act, so two simultaneous requests can each take the last
        # place.
        for number in range(4):
            served.append(asyncio.create_task(ask(client)))
            await eventually(lambda number=number: queued(patient) == number + 1, DEADLINE_S)  # type: ignore[misc]
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as refused:
                await ask(client)
            assert refused.value.code == "queue_full"
            assert refused.value.response.headers["retry-after"]
        assert len(cell.requests) == 2, "the cell never had more than its limit"
        cell.release.set()
        assert await asyncio.gather(*served) == [cell.name] * 6


@pytest.mark.asyncio
async def test_a_wait_too_long_ends(impatient: RunningIngress) -> None:
    async with FakeCell(max_connections=1).running() as cell, impatient.client() as client:
        cell.release.clear()
        await impatient.route(pool(cell))
        await impatient.sees(**{cell.name: "up"})
        running = asyncio.create_task(ask(client))
        await eventually(lambda: cell.in_flight == 1, DEADLINE_S)
        with pytest.raises(openai.InternalServerError) as ended:
            await ask(client)
        assert ended.value.code == "no_free_cell"
        assert ended.value.response.headers["retry-after"]
        assert len(cell.requests) == 1
        cell.release.set()
        assert await running == cell.name


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
async def test_batch_work_cannot_fill_the_queue_against_urgent_requests(patient: RunningIngress) -> None:
    async with FakeCell(max_connections=1).running() as cell, asyncio.TaskGroup() as group:
        cell.release.clear()
        await patient.route(pool(cell))
        await patient.sees(**{cell.name: "up"})
        batch = [
            group.create_task(patient.post(b'{"model": "demo"}', **{"X-Switchyard-Class": "batch"})) for _ in range(8)
        ]
        await eventually(lambda: sum(task.done() for task in batch) + queued(patient) == len(batch) - cell.in_flight)
        # HAProxy's threads count before they act, so each limit is one more for two simultaneous requests.
        waiting, running = queued(patient), cell.in_flight
        assert running in {1, 2}
        assert waiting in {2, 3}, "half of 3, rounded down, and one more"
        assert next(task for task in batch if task.done()).result().json()["error"]["code"] == "queue_full"
        urgent = group.create_task(patient.post(b'{"model": "demo", "n": "urgent"}'))
        await eventually(lambda: queued(patient) == waiting + 1)
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
