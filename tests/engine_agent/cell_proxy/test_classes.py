"""Classes share the real proxy: the urgent find a slot, the others are sent elsewhere, and each is counted."""

import asyncio
import json

import pytest

from tests.engine_agent.cell_proxy.engine import Turn, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

ANSWER = json_answer(b'{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5}}')


async def in_flight_is(proxy: ProxyProcess, count: int) -> bool:
    return bool((await proxy.status())["in_flight"] == count)


def batch(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="batch", x_switchyard_tenant="acme"))


def soon(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="near_realtime"))


async def test_near_real_time_work_may_have_the_whole_cell_until_urgent_requests_come() -> None:
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await go_on.wait()
        await turn.send(ANSWER)

    async with running_engine(script) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        running = [soon(proxy) for _ in range(12)]
        await until(lambda: in_flight_is(proxy, 12), "less urgent requests fill the cell and wait in its engine")
        refused = await soon(proxy)
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert "retry-after" in refused.headers
        full = "full for class near_realtime: 12 requests in flight, its limit is 12"
        assert full in refused.json()["error"]["message"]
        urgent = [asyncio.create_task(proxy.complete()) for _ in range(4)]
        await until(lambda: in_flight_is(proxy, 16), "real-time requests find room, up to twice the concurrency")
        assert (await proxy.complete()).status == 503
        assert "its limit is 7" in (await soon(proxy)).json()["error"]["message"]
        go_on.set()
        answers = await asyncio.gather(*running, *urgent)
        assert [answer.status for answer in answers] == [200] * 16


async def test_what_each_class_and_tenant_used_is_reported_and_exposed() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(ANSWER)

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        await batch(proxy)
        await proxy.complete(x_switchyard_tenant="globex")
        load = (await proxy.status())["load"]
        assert load["classes"]["batch"]["prompt_tokens_total"] == 4
        assert load["classes"]["realtime"]["completion_tokens_total"] == 5
        assert {use["tenant"]: use["completion_tokens_total"] for use in load["usage"]} == {
            "acme": 5,
            "globex": 5,
        }
        metrics = (await proxy.admin("/metrics")).body.decode()
        assert 'switchyard_proxy_requests_total{cell="c-test",class="batch",code="2xx"} 1' in metrics
        assert 'switchyard_proxy_class_prompt_tokens_total{cell="c-test",class="batch"} 4' in metrics
        assert 'switchyard_proxy_tenant_completion_tokens_total{cell="c-test",tenant="acme"} 5' in metrics
        assert "x-switchyard-tenant" not in engine.requests[0].headers


async def test_the_engine_is_told_the_priority_of_a_class_whatever_the_client_says() -> None:
    body = json.dumps({"model": "tiny", "priority": -100}).encode()
    async with running_engine() as engine, running_proxy(engine, "--priorities") as proxy:
        for serving_class in ("realtime", "near_realtime", "batch"):
            await proxy.complete(body, x_switchyard_class=serving_class)
        assert [json.loads(seen.body)["priority"] for seen in engine.requests] == [0, 100, 200]


async def test_an_engine_without_priorities_is_told_none() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await proxy.complete(b'{"model":"tiny"}', x_switchyard_class="batch")
        assert engine.requests[0].body == b'{"model":"tiny"}'


async def test_a_body_of_any_length_is_checked_and_gets_its_priority() -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 3_000_000}).encode()
    async with running_engine() as engine, running_proxy(engine, "--priorities") as proxy:
        assert (await proxy.complete(body, x_switchyard_class="batch")).status == 200
        assert json.loads(engine.requests[0].body) == {**json.loads(body), "priority": 200}
        refused = await proxy.complete(body[:-1] + b',"vllm_xargs":{"a":1}}')
        assert (refused.status, refused.json()["error"]["param"]) == (400, "vllm_xargs")
        assert len(engine.requests) == 1


async def test_a_class_that_does_not_exist_is_refused_by_name() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        answer = await proxy.ask(request("/v1/completions", b"{}", x_switchyard_class="urgent"))
        assert (answer.status, answer.json()["error"]["code"]) == (400, "bad_header")
        assert engine.requests == []
