"""Slow clients and silent engines, on real sockets and a clock that the test sets."""

import asyncio
from functools import partial
from time import monotonic

import pytest

from engine_agent.cell_proxy import downstream, endpoints
from engine_agent.cell_proxy.downstream import ClientConnection
from engine_agent.cell_proxy.settings import Limits
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LIMITS, proxy_of
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until


async def never(turn: Turn) -> None:
    await turn.gone.wait()


@pytest.mark.asyncio
async def test_a_head_that_does_not_end_is_refused_in_time() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/completions HTTP/1.1\r\nx: y\r\n")
        await until(lambda: any(client.awaits_head for client in proxy.clients), "the head has begun")
        proxy.at(LIMITS.head_timeout_s - 1)
        assert not reader.at_eof()
        proxy.at(LIMITS.head_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        writer.close()


@pytest.mark.asyncio
async def test_a_body_that_does_not_end_is_refused_in_time_and_frees_the_engine() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.body_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        assert not proxy.cell.in_flight
        writer.close()


@pytest.mark.asyncio
async def test_an_idle_connection_is_closed_in_time() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        assert (await read_message(reader)).status == 200
        proxy.at(LIMITS.idle_timeout_s - 1)
        assert len(proxy.clients) == 1
        proxy.at(LIMITS.idle_timeout_s + 1)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_every_request_renews_the_time_of_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(downstream, "monotonic", lambda: now)
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(request("/healthz"))
        assert (await read_message(reader)).status == 200
        (client,) = proxy.clients
        now += LIMITS.idle_timeout_s - 1
        writer.write(request("/healthz"))
        assert (await read_message(reader)).status == 200
        client.check(now + LIMITS.idle_timeout_s - 1)
        writer.write(request("/healthz"))
        assert (await read_message(reader)).status == 200
        client.check(now + LIMITS.idle_timeout_s)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_an_engine_that_never_answers_is_a_gateway_timeout() -> None:
    async with proxy_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.abandon_after_s + 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.response_silence_s + 1)
        assert (await read_message(reader)).status == 504
        writer.close()


@pytest.mark.asyncio
async def test_a_request_on_an_engine_that_stays_unhealthy_may_go_elsewhere() -> None:
    async with proxy_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.cell.health.failed(monotonic(), "hangs")
        proxy.at(LIMITS.abandon_after_s - 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.abandon_after_s + 1)
        answer = await read_message(reader)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        writer.close()


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_for_a_minute_loses_its_slot() -> None:
    async def flood(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        while not turn.gone.is_set():
            await turn.send(chunk(EVENTS[0] * 1000))

    async with proxy_of(flood) as proxy:
        _, writer = await proxy.send(request("/v1/completions", b"{}"))
        await until(lambda: any(client.write_stalled for client in proxy.clients), "the client is behind")
        proxy.at(LIMITS.write_stall_s - 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.write_stall_s + 1)
        await until(lambda: not proxy.cell.in_flight, "its slot is free")
        writer.close()


@pytest.mark.asyncio
async def test_more_connections_than_the_limit_are_cut() -> None:
    few = Limits(max_client_connections=1)
    async with proxy_of() as proxy:
        make = partial(ClientConnection, partial(endpoints.respond_public, proxy.cell), few, set[ClientConnection]())
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", b"{}"))
        assert (await read_message(reader)).status == 200
        second, other = await asyncio.open_connection("127.0.0.1", port)
        assert await second.read() == b""
        writer.close()
        other.close()
        server.close()


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_answer_in_time_is_untouched() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(x_switchyard_deadline_ms="5000")).status == 200
        assert "x-switchyard-deadline-ms" not in engine.requests[0].headers


@pytest.mark.parametrize(("left", "status"), [("0", 504), ("-5", 504), ("soon", 400)])
@pytest.mark.processes
@pytest.mark.asyncio
async def test_what_is_too_late_or_no_time_at_all_never_reaches_the_engine(left: str, status: int) -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(x_switchyard_deadline_ms=left)).status == status
        assert engine.requests == []


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_body_that_is_not_complete_at_the_deadline_is_answered_all_the_same() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\nx-switchyard-deadline-ms: 50\r\n\r\n{"
        assert (await proxy.ask(head)).status == 504
        assert engine.requests == []
