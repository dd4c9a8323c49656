"""Slow clients and silent engines, on real sockets with a clock that the test turns."""

import asyncio
from functools import partial
from time import monotonic

import pytest

from engine_agent.cell_proxy import downstream, endpoints
from engine_agent.cell_proxy.downstream import ClientConnection
from engine_agent.cell_proxy.settings import Limits
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk
from tests.engine_agent.cell_proxy.http_stream import read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LIMITS, proxy_of
from tests.engine_agent.cell_proxy.proxy_process import until

pytestmark = pytest.mark.asyncio


async def never(turn: Turn) -> None:
    await turn.gone.wait()


async def test_a_head_that_does_not_end_is_refused_in_time() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/completions HTTP/1.1\r\nx: y\r\n")
        await until(lambda: any(client.awaits_head for client in proxy.clients), "the head has begun")
        proxy.at(LIMITS.head_timeout_s - 1)
        assert not reader.at_eof()
        proxy.at(LIMITS.head_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        writer.close()


async def test_a_body_that_does_not_end_is_refused_in_time_and_frees_the_engine() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.body_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        assert not proxy.cell.in_flight
        writer.close()


async def test_an_idle_connection_is_closed_in_time() -> None:
    async with proxy_of() as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        assert (await read_message(reader)).status == 200
        proxy.at(LIMITS.idle_timeout_s - 1)
        assert len(proxy.clients) == 1
        proxy.at(LIMITS.idle_timeout_s + 1)
        assert await reader.read() == b""
        writer.close()


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


async def test_an_engine_that_never_answers_is_a_gateway_timeout() -> None:
    async with proxy_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.abandon_after_s + 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.response_silence_s + 1)
        assert (await read_message(reader)).status == 504
        writer.close()


async def test_a_request_on_an_engine_that_stays_unhealthy_may_go_elsewhere() -> None:
    async with proxy_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.cell.judge.failed(monotonic(), "hangs")
        proxy.at(LIMITS.abandon_after_s - 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.abandon_after_s + 1)
        answer = await read_message(reader)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        writer.close()


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
