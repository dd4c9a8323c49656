"""What requests alone tell about the engine: no probe runs here."""

import asyncio
from time import monotonic

import pytest

from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import proxy_of

pytestmark = pytest.mark.asyncio


async def test_a_request_that_cannot_connect_has_the_engine_probed_and_marks_nothing() -> None:
    async with proxy_of() as proxy:
        looked = asyncio.Event()
        proxy.cell.request_probe = looked.set
        await proxy.engine.die()
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        answer = await read_message(reader)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        assert answer.json()["error"]["code"] == "engine_unreachable"
        assert proxy.cell.judge.ok
        assert looked.is_set()
        writer.close()


async def test_tokens_of_a_stream_prove_an_engine_that_answers_again() -> None:
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await go_on.wait()
        await turn.send(chunk(EVENTS[1]))
        await turn.gone.wait()

    async with proxy_of(script) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await read_head(reader)
        assert await read_chunk(reader) == EVENTS[0]
        proxy.cell.judge.failed(monotonic(), "unready")
        proxy.cell.judge.answered(monotonic(), 1.0)
        assert proxy.cell.status().health.ok is False
        go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        assert proxy.cell.status().health.ok is True
        writer.close()
