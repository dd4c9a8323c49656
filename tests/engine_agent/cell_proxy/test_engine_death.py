"""Answers to clients when an engine fails at any moment of a request, through the real proxy."""

import asyncio
import json

import pytest

from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, request
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

UNWELL = json_answer(b'{"reason":"follower lost"}', b"503 Service Unavailable")


def assert_another_cell_may_take_it(answer: Message, code: str) -> None:
    assert answer.status == 503
    assert answer.headers["x-switchyard-retry"] == "1"
    assert answer.headers["x-switchyard-cell"] == "c-test"
    assert answer.json()["error"]["code"] == code


async def test_death_before_the_head_may_be_retried_elsewhere() -> None:
    async def script(turn: Turn) -> None:
        engine.health = UNWELL
        turn.die()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert_another_cell_may_take_it(await proxy.complete(), "engine_died")
        assert (await proxy.status())["load"]["errors_total"] == 1


async def test_death_between_head_and_first_byte_may_be_retried_elsewhere() -> None:
    async def script(turn: Turn) -> None:
        engine.health = UNWELL
        await turn.send(STREAM_HEAD)
        turn.die()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert_another_cell_may_take_it(await proxy.complete(), "engine_died")


async def test_a_refused_connection_may_be_retried_elsewhere_and_has_the_engine_probed() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await engine.die()
        answer = await proxy.complete()
        assert answer.status == 503
        assert answer.headers["x-switchyard-retry"] == "1"
        await until(proxy.is_unhealthy, "the death is seen")


async def test_death_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]) + chunk(EVENTS[1]))
        turn.die()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert answer.whole
        assert answer.body.startswith(EVENTS[0] + EVENTS[1])
        event = answer.body.removeprefix(EVENTS[0] + EVENTS[1])
        assert event.endswith(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_died"
        metrics = (await proxy.admin("/metrics")).body.decode()
        assert 'switchyard_proxy_errors_total{cell="c-test"} 1' in metrics


async def test_a_stream_that_breaks_inside_an_event_still_ends_with_a_readable_one() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0] + b'data: {"cho'))
        turn.die()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        last = (await proxy.complete()).body.rstrip(b"\n").split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"


async def test_death_in_the_middle_of_an_answer_with_a_length_breaks_it_off() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(json_answer(b"x" * 1000)[:-500])
        turn.die()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert not (await proxy.complete()).whole


async def test_an_error_answer_of_a_dying_engine_may_be_retried_elsewhere() -> None:
    async def script(turn: Turn) -> None:
        engine.health = json_answer(b'{"reason":"follower lost"}', b"503 Service Unavailable")
        await turn.send(json_answer(b'{"error":{"message":"engine core died"}}', b"500 Internal Server Error"))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert_another_cell_may_take_it(answer, "engine_died")
        assert "follower lost" in answer.json()["error"]["message"]


async def test_a_stream_that_opens_with_the_error_of_a_dying_engine_may_be_retried_elsewhere() -> None:
    async def script(turn: Turn) -> None:
        engine.health = json_answer(b"", b"503 Service Unavailable")
        await turn.send_stream([b'data: {"error": {"message": "engine core died"}}\n\n', b"data: [DONE]\n\n"])

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert_another_cell_may_take_it(await proxy.complete(), "engine_died")


async def test_an_error_answer_of_a_healthy_engine_passes() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(json_answer(b'{"error":"no"}', b"500 Internal Server Error"))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert (answer.status, answer.json()["error"]["message"]) == (500, "no")
        assert (await proxy.status())["load"]["errors_total"] == 1


async def test_an_answer_that_is_not_http_is_a_bad_gateway() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"SMTP ready\r\n")
        await turn.gone.wait()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete()
        assert answer.status == 502
        assert "x-switchyard-retry" not in answer.headers


async def test_the_cell_recovers_with_its_engine_once_a_token_came_out() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        probes = engine.token_probes
        await engine.die()
        await until(proxy.is_unhealthy, "the death is seen")
        await engine.start()
        await until(proxy.is_healthy, "the new engine is seen")
        assert engine.token_probes > probes
        assert (await proxy.complete()).status == 200


async def test_a_client_that_leaves_frees_the_engine_at_once() -> None:
    gone = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await turn.gone.wait()
        gone.set()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await reader.readuntil(EVENTS[0])
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 60)
        assert (await proxy.status())["in_flight"] == 0
        await until(lambda: bool(proxy.log_lines("request")), "the request is logged")
        assert proxy.log_lines("request")[0]["outcome"] == "client_gone"


async def test_a_client_that_leaves_before_the_first_byte_frees_the_engine_too() -> None:
    gone = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        gone.set()

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await until(lambda: len(engine.requests) == 1, "the engine has the request")
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)
