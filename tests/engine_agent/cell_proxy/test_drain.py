"""A real proxy that drains: it takes no new requests, those in flight finish, and the process exits in time."""

import asyncio

import pytest

from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


class HeldStream:
    """A script that sends one event and the rest on command."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await self.go_on.wait()
        await turn.send(chunk(EVENTS[1]) + b"0\r\n\r\n")


async def begin(proxy: ProxyProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of which the first event has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(request("/v1/completions", b"{}"))
    await read_head(reader)
    assert await read_chunk(reader) == EVENTS[0]
    return reader, writer


async def test_a_drained_cell_refuses_what_is_new_and_finishes_what_runs() -> None:
    script = HeldStream()
    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await begin(proxy)
        status = (await proxy.admin("/phase", b'{"phase":"drain"}')).json()
        assert (status["phase"], status["in_flight"]) == ("drain", 1)
        refused = await proxy.complete()
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert refused.json()["error"]["code"] == "cell_draining"
        assert (await proxy.health_check())[0] == 404, "HAProxy takes it for a drain"
        script.go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        assert await read_chunk(reader) == b""
        writer.close()
        await until(lambda: is_idle(proxy), "the stream has ended")


async def is_idle(proxy: ProxyProcess) -> bool:
    return bool((await proxy.status())["in_flight"] == 0)


async def test_a_drained_cell_serves_again_when_told() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await proxy.admin("/phase", b'{"phase":"drain"}')
        await proxy.admin("/phase", b'{"phase":"serve"}')
        assert (await proxy.complete()).status == 200
        assert await proxy.health_check() == (200, "")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"phase":"sleep"}', b'{"phase":"stop"}'])
async def test_an_unknown_phase_is_refused_with_the_phases_there_are(body: bytes) -> None:
    async with running_engine() as engine, running_proxy(engine, wait=False) as proxy:
        await until(lambda: answers(proxy), "the proxy listens")
        answer = await proxy.admin("/phase", body)
        assert answer.status == 400
        assert '{"phase": "drain"}' in answer.json()["error"]["message"]


async def answers(proxy: ProxyProcess) -> bool:
    try:
        return (await proxy.admin("/status")).status == 200
    except OSError:
        return False


async def test_sigterm_waits_for_a_stream_and_then_ends_the_process() -> None:
    script = HeldStream()
    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await begin(proxy)
        proxy.terminate()
        await until(lambda: is_stopping(proxy), "the proxy drains")
        assert (await proxy.complete()).status == 503
        assert proxy.process.returncode is None
        script.go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        assert await read_chunk(reader) == b""
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
        writer.close()


async def is_stopping(proxy: ProxyProcess) -> bool:
    return bool((await proxy.status())["phase"] == "stop")


async def test_sigterm_cuts_a_stream_that_outlives_the_grace_with_an_error_event() -> None:
    async with running_engine(HeldStream()) as engine, running_proxy(engine, "--grace-s", "0.3") as proxy:
        reader, writer = await begin(proxy)
        proxy.terminate()
        assert b"cell_stopping" in await read_chunk(reader)
        assert await read_chunk(reader) == b""
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
        writer.close()


async def test_sigterm_tells_a_request_without_an_answer_to_try_elsewhere() -> None:
    async def never(turn: Turn) -> None:
        await turn.gone.wait()

    async with running_engine(never) as engine, running_proxy(engine, "--grace-s", "0.3") as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await until(lambda: len(engine.requests) == 1, "the engine has the request")
        proxy.terminate()
        answer = await read_message(reader)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        writer.close()
