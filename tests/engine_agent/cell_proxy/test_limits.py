"""Refusals of the real proxy, and back-pressure between fast and slow sides."""

import asyncio
import socket

import pytest

from tests.engine_agent.cell_proxy.engine import Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_head, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

MIB = 1024 * 1024


async def open_to(proxy: ProxyProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def test_a_body_that_announces_too_much_is_refused_before_it_is_sent() -> None:
    async with running_engine() as engine, running_proxy(engine, "--max-body-bytes", "1000") as proxy:
        answer = await proxy.ask(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1001\r\n\r\n")
        assert answer.status == 413
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
        assert "1000 bytes" in error["message"]
        assert engine.requests == []


async def test_a_client_that_sends_everything_before_it_reads_still_sees_the_refusal() -> None:
    loop = asyncio.get_running_loop()
    async with running_engine() as engine, running_proxy(engine, "--max-body-bytes", "1000") as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as plain:
            plain.setblocking(False)
            await loop.sock_sendall(plain, request("/v1/completions", b"x" * 16 * MIB))
            assert (await loop.sock_recv(plain, 100)).startswith(b"HTTP/1.1 413 ")


async def test_a_chunked_body_is_refused_once_it_is_too_long() -> None:
    async with running_engine() as engine, running_proxy(engine, "--max-body-bytes", "1000") as proxy:
        head = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await open_to(proxy)
        writer.write(head + chunk(b"x" * 900))
        await writer.drain()
        writer.write(chunk(b"x" * 200))
        assert (await read_message(reader)).status == 413
        writer.close()
        assert engine.requests == []


async def test_a_body_at_the_default_limit_of_4_mib_passes() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        body = b'{"prompt":"%b"}' % (b"x" * (4 * MIB - 13))
        assert (await proxy.complete(body)).status == 200
        assert engine.requests[0].body == body
        assert (await proxy.complete(body + b" ")).status == 413


async def test_a_chunked_body_in_pieces_arrives_whole() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        reader, writer = await open_to(proxy)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        await until(lambda: in_flight_is(proxy, 1), "the request goes on without its body")
        for piece in (b'{"prompt":', b'"hi"}'):
            writer.write(chunk(piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await read_message(reader)).status == 200
        writer.close()
        assert engine.requests[0].body == b'{"prompt":"hi"}'


async def in_flight_is(proxy: ProxyProcess, count: int) -> bool:
    return bool((await proxy.status())["in_flight"] == count)


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        reader, writer = await open_to(proxy)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert (await read_head(reader))[0] == "HTTP/1.1 100 Continue"
        writer.write(b"{}")
        assert (await read_message(reader)).status == 200
        writer.close()
        assert "expect" not in engine.requests[0].headers


async def test_bad_input_is_refused_in_the_form_of_openai() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        for raw, status in (
            (b"NONSENSE\r\n\r\n", 400),
            (b"GET /v1/completions HTTP/1.1\r\nlong: " + b"x" * 70_000 + b"\r\n\r\n", 431),
            (b"GET /health HTTP/1.1\r\n\r\n", 404),
            (b"TRACE /v1/completions HTTP/1.1\r\n\r\n", 405),
        ):
            answer = await proxy.ask(raw)
            assert answer.status == status
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert engine.requests == []


async def test_nonsense_after_a_good_request_is_refused_after_its_answer() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        reader, writer = await open_to(proxy)
        writer.write(request("/v1/completions", b"{}") + b"NONSENSE\r\n\r\n")
        assert (await read_message(reader)).status == 200
        assert (await read_message(reader)).status == 400
        assert await reader.read() == b""
        writer.close()


async def test_beyond_twice_its_concurrency_the_cell_refuses_and_recovers() -> None:
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await go_on.wait()
        await turn.send(json_answer(b"{}"))

    async with running_engine(script) as engine, running_proxy(engine, max_concurrency=2) as proxy:
        running = [asyncio.create_task(proxy.complete()) for _ in range(4)]
        await until(lambda: in_flight_is(proxy, 4), "four requests run")
        assert (await proxy.status())["load"]["queued"] == 2
        refused = await proxy.complete()
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert refused.json()["error"]["code"] == "cell_saturated"
        assert (await proxy.ask(request("/healthz"))).status == 200
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*running)] == [200] * 4
        assert (await proxy.complete()).status == 200


async def test_a_response_that_must_be_kept_never_reaches_the_engine() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        for member in (b'"background":true', b'"st\\u006fre":true', b'"previous_response_id":"resp_1"'):
            reader, writer = await open_to(proxy)
            body = b'{"model":"m","input":"x",' + member + b"}"
            writer.write(b"POST /v1/responses HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            refused = await read_message(reader)
            assert (refused.status, refused.json()["error"]["code"]) == (400, "unsupported_parameter"), body
            assert refused.json()["error"]["type"] == "invalid_request_error"
            writer.close()
        assert engine.requests == []


async def test_a_body_with_two_meanings_never_reaches_the_engine() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        for headers, body in (
            (b"", b'{"model":"a","model":"b"}'),
            (b"", b'{"model":"a","priority":-9,"x":NaN}'),
            (b"x-switchyard-model: org%2fa\r\n", b'{"model":"b"}'),
        ):
            reader, writer = await open_to(proxy)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)
            )
            refused = await read_message(reader)
            assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_json"), body
            writer.close()
        assert engine.requests == []
        reader, writer = await open_to(proxy)
        body = b'{"model":"org/a"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nx-switchyard-model: org%%2fa\r\ncontent-length: 17\r\n\r\n%b" % body
        )
        assert (await read_message(reader)).status == 200
        writer.close()
        assert b"x-switchyard-model" not in str(engine.requests[0]).encode()
