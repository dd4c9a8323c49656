"""Slow clients and silent engines, on real sockets with a clock that the test turns."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import pytest

from engine_agent.proxy import front
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.downstream import ClientConnection
from engine_agent.proxy.log import LineLog
from engine_agent.proxy.settings import Limits, ProxySettings
from tests.engine_agent.proxy.engine import EVENTS, STREAM_HEAD, Script, Turn, answer_one_token, chunk, running_engine
from tests.engine_agent.proxy.http_stream import read_message, request
from tests.engine_agent.proxy.proxy_process import until

pytestmark = pytest.mark.asyncio

LIMITS = Limits()


class Front:
    """The public port of a proxy inside the test's own loop; `at` turns the clock forward."""

    def __init__(self, cell: Cell, clients: set[ClientConnection], port: int) -> None:
        self.cell = cell
        self.clients = clients
        self.port = port

    def at(self, seconds_from_now: float) -> None:
        now = monotonic() + seconds_from_now
        for client in tuple(self.clients):
            client.check(now)
        for each in tuple(self.cell.in_flight):
            each.check(now)

    async def send(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        return reader, writer


@asynccontextmanager
async def front_of(script: Script = answer_one_token) -> AsyncIterator[Front]:
    async with running_engine(script) as engine:
        settings = ProxySettings(
            "n-1", "c-1", 1, "127.0.0.1", 0, 0, 0, "127.0.0.1", engine.port, "tiny", 4, "ping", limits=LIMITS
        )
        null = os.open(os.devnull, os.O_WRONLY)
        cell = Cell(settings, LineLog(null, requests=False))
        cell.judge.answered(monotonic(), 1.0)
        cell.judge.token_seen(monotonic())
        clients: set[ClientConnection] = set()
        make: Callable[[], ClientConnection] = partial(ClientConnection, partial(front.respond, cell), LIMITS, clients)
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        try:
            yield Front(cell, clients, server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for client in tuple(clients):
                client.abort()
            cell.pool.close()
            os.close(null)


async def never(turn: Turn) -> None:
    await turn.gone.wait()


async def test_a_head_that_does_not_end_is_refused_in_time() -> None:
    async with front_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/x HTTP/1.1\r\nx: y\r\n")
        await until(lambda: any(client.awaits_head for client in proxy.clients), "the head has begun")
        proxy.at(LIMITS.head_timeout_s - 1)
        assert not reader.at_eof()
        proxy.at(LIMITS.head_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        writer.close()


async def test_a_body_that_does_not_end_is_refused_in_time_and_frees_the_engine() -> None:
    async with front_of() as proxy:
        reader, writer = await proxy.send(b"POST /v1/x HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.body_timeout_s + 1)
        assert (await read_message(reader)).status == 408
        assert not proxy.cell.in_flight
        writer.close()


async def test_an_idle_connection_is_closed_in_time() -> None:
    async with front_of() as proxy:
        reader, writer = await proxy.send(request("/v1/x", b"{}"))
        assert (await read_message(reader)).status == 200
        proxy.at(LIMITS.idle_timeout_s - 1)
        assert len(proxy.clients) == 1
        proxy.at(LIMITS.idle_timeout_s + 1)
        assert await reader.read() == b""
        writer.close()


async def test_an_engine_that_never_answers_is_a_gateway_timeout() -> None:
    async with front_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/x", b"{}"))
        await until(lambda: bool(proxy.cell.in_flight), "the request is on its way")
        proxy.at(LIMITS.abandon_after_s + 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.response_silence_s + 1)
        assert (await read_message(reader)).status == 504
        writer.close()


async def test_a_request_on_an_engine_that_stays_unhealthy_may_go_elsewhere() -> None:
    async with front_of(never) as proxy:
        reader, writer = await proxy.send(request("/v1/x", b"{}"))
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

    async with front_of(flood) as proxy:
        _, writer = await proxy.send(request("/v1/x", b"{}"))
        await until(lambda: any(client.write_stalled for client in proxy.clients), "the client is behind")
        proxy.at(LIMITS.write_stall_s - 1)
        assert proxy.cell.in_flight
        proxy.at(LIMITS.write_stall_s + 1)
        await until(lambda: not proxy.cell.in_flight, "its slot is free")
        writer.close()


async def test_more_connections_than_the_limit_are_cut() -> None:
    few = Limits(max_client_connections=1)
    async with front_of() as proxy:
        make = partial(ClientConnection, partial(front.respond, proxy.cell), few, set[ClientConnection]())
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/x", b"{}"))
        assert (await read_message(reader)).status == 200
        second, other = await asyncio.open_connection("127.0.0.1", port)
        assert await second.read() == b""
        writer.close()
        other.close()
        server.close()
