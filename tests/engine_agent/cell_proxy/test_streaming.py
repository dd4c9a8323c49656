"""Answers pass through the real proxy unchanged, chunk by chunk, and are counted on the way."""

import asyncio
import json
import re
from collections.abc import Callable

import pytest

from tests.engine_agent.cell_proxy.engine import (
    DONE,
    EVENTS,
    ONE_TOKEN,
    STREAM_HEAD,
    Turn,
    chunk,
    json_answer,
    running_engine,
)
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


async def test_a_stream_passes_byte_for_byte_and_its_tokens_are_counted() -> None:
    async def script(turn: Turn) -> None:
        await turn.send_stream([*EVENTS, DONE])

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert answer.status == 200
        assert answer.body == b"".join([*EVENTS, DONE])
        assert answer.headers["x-switchyard-cell"] == "c-test"
        load = (await proxy.status())["load"]
        assert load["requests_total"] == 1
        assert load["errors_total"] == 0
        assert load["tokens_per_s"] > 0
        assert load["ttft_p50_ms"] > 0
        metrics = (await proxy.admin("/metrics")).body.decode()
        assert 'switchyard_proxy_tokens_total{cell="c-test"} 5' in metrics
        assert 'switchyard_proxy_requests_total{cell="c-test",class="realtime",code="2xx"} 1' in metrics


async def test_every_event_arrives_before_the_next_is_made() -> None:
    step = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        for event in EVENTS:
            await turn.send(chunk(event))
            await step.wait()
            step.clear()
        await turn.send(b"0\r\n\r\n")

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        first_line, headers = await read_head(reader)
        assert first_line == "HTTP/1.1 200 OK"
        assert headers["content-type"] == "text/event-stream"
        for event in EVENTS:
            assert await read_chunk(reader) == event
            step.set()
        assert await read_chunk(reader) == b""
        writer.close()
        metrics = (await proxy.admin("/metrics")).body.decode()
        assert 'switchyard_proxy_ttft_seconds_count{cell="c-test",class="realtime"} 1' in metrics
        assert 'switchyard_proxy_itl_seconds_count{cell="c-test"} 4' in metrics


async def test_headers_wait_for_the_first_byte_of_the_body() -> None:
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        await go_on.wait()
        await turn.send(chunk(EVENTS[0]) + b"0\r\n\r\n")

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await until(lambda: len(engine.requests) == 1, "the engine has the request")
        await proxy.status()  # another round trip through the same loop: the engine's head has been read long before
        assert not reader._buffer  # type: ignore[attr-defined]
        go_on.set()
        assert (await read_head(reader))[0] == "HTTP/1.1 200 OK"
        writer.close()


async def test_an_answer_with_a_length_keeps_it_and_its_usage_is_counted() -> None:
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}).encode()

    async def script(turn: Turn) -> None:
        await turn.send(json_answer(body))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert answer.headers["content-length"] == str(len(body))
        assert answer.headers["x-switchyard-prompt-tokens"] == "3"
        assert answer.headers["x-switchyard-completion-tokens"] == "7"
        assert re.fullmatch(r"queue;dur=\d+\.\d, engine;dur=\d+\.\d", answer.headers["server-timing"])
        assert answer.body == body
        metrics = (await proxy.admin("/metrics")).body.decode()
        assert 'switchyard_proxy_tokens_total{cell="c-test"} 7' in metrics


async def test_an_answer_that_ends_with_the_connection_arrives_whole() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
        turn.end()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert answer.whole
        assert answer.body == b"all of it"


async def test_a_request_id_passes_both_ways_and_one_is_made_where_there_is_none() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete(x_request_id="abc-1")
        assert answer.headers["x-request-id"] == "abc-1"
        assert engine.requests[0].headers["x-request-id"] == "abc-1"
        made = (await proxy.complete()).headers["x-request-id"]
        assert len(made) == 32
        assert engine.requests[1].headers["x-request-id"] == made


async def test_each_request_is_one_line_of_the_access_log() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await proxy.complete(x_request_id="abc-2")
        await until(lambda: bool(proxy.log_lines("request")), "the line is written")
        (line,) = proxy.log_lines("request")
        assert line["request_id"] == "abc-2"
        assert (line["status"], line["tokens"], line["outcome"]) == (200, 1, "answered")
        assert line["duration_ms"] > 0


async def test_without_access_log_only_changes_of_state_are_logged() -> None:
    async with running_engine() as engine, running_proxy(engine, "--no-access-log") as proxy:
        await proxy.complete()
        proxy.terminate()
        assert await proxy.process.wait() == 0
        assert proxy.log_lines("request") == []
        assert proxy.log_lines("stopped") != []


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


MIB = 1024 * 1024
TOTAL_BYTES = 64 * MIB
PIECE = b"x" * 65536
HELD_AT_MOST_BYTES = 24 * MIB
"""The kernel's buffers of two loopback connections take most of it."""
STILL_POLLS = 20


class Progress:
    def __init__(self) -> None:
        self.sent_bytes = 0

    def stands_still(self) -> Callable[[], bool]:
        """True once nothing was sent for some polls in a row."""
        seen: list[int] = []

        def condition() -> bool:
            seen.append(self.sent_bytes)
            return len(seen) > STILL_POLLS and len(set(seen[-STILL_POLLS:])) == 1

        return condition


async def test_a_client_that_does_not_read_holds_the_engine_back() -> None:
    progress = Progress()

    async def script(turn: Turn) -> None:
        if "/v1/embeddings" in turn.message.first_line:
            await turn.send(ONE_TOKEN)
            return
        await turn.send(STREAM_HEAD)
        while progress.sent_bytes < TOTAL_BYTES:
            await turn.send(chunk(PIECE))
            progress.sent_bytes += len(PIECE)
        await turn.send(b"0\r\n\r\n")

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await read_head(reader)
        await until(progress.stands_still(), "the engine is held back")
        assert progress.sent_bytes < HELD_AT_MOST_BYTES
        assert (await proxy.ask(request("/v1/embeddings", b"{}"))).status == 200
        received_bytes = 0
        while piece := await read_chunk(reader):
            received_bytes += len(piece)
        assert received_bytes == TOTAL_BYTES
        writer.close()
