"""Connections are used again on both sides of the real proxy, and a stale one costs no request."""

import asyncio

import pytest

from tests.engine_agent.cell_proxy.engine import ONE_TOKEN, Turn, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_message, request
from tests.engine_agent.cell_proxy.proxy_process import running_proxy

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


async def test_one_client_connection_and_one_engine_connection_carry_many_requests() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(5):
            writer.write(request("/v1/completions", b'{"a":1}'))
            assert (await read_message(reader)).status == 200
        writer.close()
        assert len(engine.requests) == 5
        assert engine.connections == 1


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def script(turn: Turn) -> None:
        body = turn.message.body
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        bodies = [b'{"n":1}', b'{"n":2}', b'{"n":3}']
        writer.write(b"".join(request("/v1/completions", body) for body in bodies))
        assert [(await read_message(reader)).body for _ in bodies] == bodies
        writer.close()


async def test_a_request_on_a_connection_that_the_engine_just_closed_is_sent_again() -> None:
    async def script(turn: Turn) -> None:
        if len(engine.requests) == 2:
            turn.die()  # the second request of a kept connection dies unanswered, as in a keep-alive race
        else:
            await turn.send(ONE_TOKEN)

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete()).status == 200
        assert (await proxy.complete(b'{"again":true}')).status == 200
        assert [message.body for message in engine.requests] == [b"{}", b'{"again":true}', b'{"again":true}']
        assert engine.connections == 2


async def test_a_client_that_asks_to_close_is_closed() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}", connection="close"))
        answer = await read_message(reader)
        assert answer.headers["connection"] == "close"
        assert await reader.read() == b""
        writer.close()
        assert "connection" not in engine.requests[0].headers


async def test_a_client_of_http_1_0_gets_its_answer_without_chunks() -> None:
    async def script(turn: Turn) -> None:
        await turn.send_stream([b"data: 1\n\n", b"data: 2\n\n"])

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"transfer-encoding" not in head
        assert body == b"data: 1\n\ndata: 2\n\n"
