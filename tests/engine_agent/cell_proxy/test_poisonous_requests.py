"""A request can harm only itself: even if it breaks the engine's connection or the proxy's code, it gets a final
answer, and probes alone decide the cell's health."""

import asyncio
import json
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from engine_agent.cell_proxy import endpoints, exchange
from engine_agent.cell_proxy.exchange import Exchange
from engine_agent.cell_proxy.meter import Meter
from engine_agent.cell_proxy.request_parser import RequestParser
from engine_agent.cell_proxy.request_record import RequestRecord
from engine_agent.cell_proxy.rewrite import Upload
from engine_agent.cell_proxy.upstream import EnginePool
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of
from tests.engine_agent.cell_proxy.proxy_process import running_proxy

asynchronous = pytest.mark.asyncio
NESTED = b'{"model":"tiny","prompt":"x","metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1001
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODIES: dict[str, bytes] = {
    "nested 1,000 levels": NESTED,
    "nested 100,000 levels": b"[" * 100_000,
    "nested without an end": b'{"a":' * 50_000,
    "a member twice in a message": b'{"model":"tiny","messages":[{"role":"user","role":"system","content":"x"}]}',
    "a member twice in a tool": b'{"model":"tiny","tools":[{"type":"function","function":{"name":"a","name":"b"}}]}',
    "a NUL in a name": b'{"model":"tiny","pro\\u0000mpt":"x"}',
    "a long name": b'{"model":"tiny","' + b"n" * 60_000 + b'":1}',
    "half of a surrogate pair": b'{"model":"tiny","prompt":"\\ud800"}',
    "no UTF-8": b'{"model":"tiny","prompt":"\xff\xfe"}',
    "a number without end": b'{"model":"tiny","max_tokens":' + b"9" * 100_000 + b"}",
    "no finite number": b'{"model":"tiny","temperature":1e999}',
    "many objects": b'{"model":"tiny","a":[' + b"{}," * 1_000_000 + b"{}]}",
    "a list": b"[]",
    "nothing but a brace": b"{",
    "long, and no JSON at its end": b'{"model":"tiny","prompt":"' + b"x" * 2_000_000 + b'"',
}


def assert_is_final(answer: Message, status: int, code: str) -> None:
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert "x-switchyard-retry" not in answer.headers


async def ask(proxy: LocalProxy, path: str = "/v1/completions", body: bytes = b'{"model":"tiny"}') -> Message:
    reader, writer = await proxy.send(request(path, body))
    async with asyncio.timeout(30):
        answer = await read_message(reader)
    writer.close()
    return answer


@asynchronous
@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_no_parser_can_take_gets_400_in_its_dialect(name: str) -> None:
    async with proxy_of() as proxy:
        openai, anthropic = await ask(proxy, CHAT, BODIES[name]), await ask(proxy, MESSAGES, BODIES[name])
        assert_is_final(openai, 400, "invalid_json")
        assert openai.json()["error"]["type"] == "invalid_request_error"
        assert_is_final(anthropic, 400, "invalid_json")
        assert anthropic.json()["type"] == "error"
        assert proxy.engine.requests == []
        assert proxy.cell.health.ok
        assert not proxy.cell.in_flight
        assert (await ask(proxy)).status == 200


@pytest.mark.processes
@asynchronous
async def test_a_request_whose_connection_a_healthy_engine_drops_goes_to_no_other_cell() -> None:
    async def script(turn: Turn) -> None:
        if b"poison" in turn.message.body:
            turn.die()
        else:
            await turn.send(json_answer(b"{}"))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        for _ in range(5):
            answer = await proxy.complete(b'{"prompt":"poison"}')
            assert_is_final(answer, 502, "engine_dropped_request")
            assert answer.headers["x-should-retry"] == "false"
            assert await proxy.is_healthy()
        assert (await proxy.complete()).status == 200
        assert (await proxy.status())["load"]["errors_total"] == 5, "whoever sent them suffered"


@asynchronous
async def test_an_engine_whose_health_does_not_answer_is_not_taken_for_well() -> None:
    async def script(turn: Turn) -> None:
        turn.die()

    async def unanswered() -> bool:
        proxy.cell.health.timed_out(monotonic())
        return proxy.cell.health.ok

    async with proxy_of(script) as proxy:
        proxy.cell.check_health = unanswered
        answer = await ask(proxy)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_died")
        assert answer.headers["x-switchyard-retry"] == "1"


def fail(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("injected")


async def fail_later(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("injected")


STAGES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "parsing HTTP": (RequestParser, "feed", fail),
    "choosing who answers": (endpoints, "Exchange", fail),
    "admission": (exchange, "read_metadata", fail),
    "rewriting": (exchange, "prepare", fail),
    "connecting": (EnginePool, "connect", fail_later),
    "sending": (Upload, "opening", fail),
    "reading": (Exchange, "_forward", fail),
    "reading the record": (RequestRecord, "add", fail),
}


@asynchronous
@pytest.mark.parametrize("stage", STAGES)
async def test_an_exception_in_any_stage_is_that_requests_answer(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_of() as proxy:
        with monkeypatch.context() as injected:
            owner, name, failing = STAGES[stage]
            injected.setattr(owner, name, failing)
            assert_is_final(await ask(proxy), 500, "internal_error")
        assert not proxy.cell.in_flight
        assert proxy.cell.health.ok
        assert (await ask(proxy)).status == 200


@asynchronous
@pytest.mark.parametrize("name", ["ended", "settled"])
async def test_an_exception_while_a_request_is_counted_does_not_cost_its_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxy_of() as proxy:
        with monkeypatch.context() as injected:
            injected.setattr(Meter, name, fail)
            assert (await ask(proxy)).status == 200
        assert not proxy.cell.in_flight


@asynchronous
async def test_an_exception_in_a_stream_ends_it_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_first = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await sent_first.wait()
        await turn.send(chunk(EVENTS[1]))
        await turn.gone.wait()

    async with proxy_of(script) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b'{"stream":true}'))
        await reader.readuntil(EVENTS[0])
        monkeypatch.setattr(RequestRecord, "add", fail)
        sent_first.set()
        rest = await reader.read()
        event = next(line for line in rest.splitlines() if line.startswith(b"data: "))
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "internal_error"
        writer.close()


@asynchronous
async def test_the_sweep_outlives_a_request_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    has_it = asyncio.Event()

    async def script(turn: Turn) -> None:
        has_it.set()
        await turn.gone.wait()

    async with proxy_of(script) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await has_it.wait()
        monkeypatch.setattr(type(proxy.cell.health), "bad_for_s", fail)
        proxy.at(proxy.cell.settings.limits.abandon_after_s + 1)
        assert_is_final(await read_message(reader), 500, "internal_error")
        writer.close()
