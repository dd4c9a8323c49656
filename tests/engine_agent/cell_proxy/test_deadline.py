"""A request that is too late ends with a clear error, and its engine is let go at once."""

import asyncio

import pytest

from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.proxy_process import running_proxy

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


async def test_a_deadline_that_passes_before_the_answer_is_a_504_and_the_engine_stops() -> None:
    stopped = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        stopped.set()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete(x_switchyard_deadline_ms="1500")
        assert (answer.status, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "x-switchyard-retry" not in answer.headers
        async with asyncio.timeout(60):
            await stopped.wait()
        assert (await proxy.status())["in_flight"] == 0
        assert (await proxy.status())["load"]["errors_total"] == 0


async def test_a_deadline_that_passes_in_a_stream_ends_it_with_an_error_event() -> None:
    stopped = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await turn.gone.wait()
        stopped.set()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete(x_switchyard_deadline_ms="1500")
        assert answer.body.startswith(EVENTS[0])
        assert b'"code":"deadline_exceeded"' in answer.body
        async with asyncio.timeout(60):
            await stopped.wait()


async def test_an_answer_in_time_is_untouched() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(x_switchyard_deadline_ms="5000")).status == 200
        assert "x-switchyard-deadline-ms" not in engine.requests[0].headers


@pytest.mark.parametrize(("left", "status"), [("0", 504), ("-5", 504), ("soon", 400)])
async def test_what_is_too_late_or_no_time_at_all_never_reaches_the_engine(left: str, status: int) -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(x_switchyard_deadline_ms=left)).status == status
        assert engine.requests == []


async def test_a_deadline_shorter_than_what_the_cell_takes_at_present_is_sent_elsewhere() -> None:
    async def script(turn: Turn) -> None:
        await asyncio.sleep(0.05)
        await turn.send_stream(EVENTS)

    async with running_engine(script) as engine, running_proxy(engine, max_concurrency=20) as proxy:
        await asyncio.gather(*(proxy.complete() for _ in range(20)))
        answer = await proxy.complete(x_switchyard_deadline_ms="5")
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        assert answer.json()["error"]["code"] == "deadline_unreachable"
        assert (await proxy.complete(x_switchyard_deadline_ms="5000")).status == 200


async def test_a_body_that_is_not_complete_at_the_deadline_is_answered_all_the_same() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\nx-switchyard-deadline-ms: 50\r\n\r\n{"
        assert (await proxy.ask(head)).status == 504
        assert engine.requests == []
