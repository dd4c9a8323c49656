"""Clients that stop sending or reading lose their places, without harm to others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = pytest.mark.processes

BODY = b'{"model": "demo"}'
STREAM = b'{"model": "demo", "stream": true}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"


@pytest_asyncio.fixture
async def strict(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    ingress = RunningIngress(tmp_path / "home")
    times = replace(ingress.settings.times, request_head_s=1, request_body_s=1, client_stall_s=1)
    ingress.use(replace(ingress.settings, times=times))
    async with ingress.running() as running:
        yield running


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def sent(ingress: RunningIngress, text: bytes, count: int = 1) -> AsyncIterator[list[Connection]]:
    """Connections that have sent these bytes."""
    pairs = [await asyncio.open_connection("127.0.0.1", ingress.settings.port, limit=1024) for _ in range(count)]
    try:
        for _, writer in pairs:
            writer.write(text)
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()


@pytest.mark.parametrize(
    "beginning",
    [b"POST /v1/chat", HEAD % 17, HEAD % 17 + b"\r\n" + BODY[:5]],
    ids=["in its first line", "in its headers", "in its body"],
)
@pytest.mark.asyncio
async def test_a_request_that_never_ends_is_given_up_and_hinders_nobody(
    strict: RunningIngress, beginning: bytes
) -> None:
    async with FakeCell().running() as cell:
        await strict.route(pool(cell))
        await strict.sees(**{cell.name: "up"})
        async with sent(strict, beginning, count=50) as slow:
            assert (await strict.post(BODY)).status_code == 200
            for reader, _ in slow:
                answer = await asyncio.wait_for(reader.read(), 60)
                assert answer.startswith(b"HTTP/1.1 408")
        assert len(cell.requests) == 1


@pytest.mark.asyncio
async def test_a_client_that_takes_nothing_of_its_stream_leaves_its_place(strict: RunningIngress) -> None:
    async with FakeCell(chunks=100_000).running() as cell:
        await strict.route(pool(cell))
        await strict.sees(**{cell.name: "up"})
        async with sent(strict, HEAD % len(STREAM) + b"\r\n" + STREAM):
            await eventually(lambda: cell.in_flight == 1)
            await eventually(lambda: cell.in_flight == 0, 60, "the cell is rid of it")


@pytest.mark.asyncio
async def test_a_client_that_only_waits_for_a_slow_cell_is_not_slow(strict: RunningIngress) -> None:
    async with FakeCell(chunks=2).running() as cell:
        await strict.route(pool(cell))
        await strict.sees(**{cell.name: "up"})
        cell.release.clear()
        stall_s = strict.settings.times.client_stall_s
        async with asyncio.TaskGroup() as group:
            streamed, whole = (group.create_task(strict.post(body)) for body in (STREAM, BODY))
            await eventually(lambda: cell.in_flight == 2)
            asyncio.get_running_loop().call_later(stall_s + 0.5, cell.release.set)
        assert b"[DONE]" in streamed.result().content
        assert whole.result().status_code == 200
