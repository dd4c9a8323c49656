import asyncio
import json

import pytest

from engine_agent.cell_proxy.admission import (
    BadHeader,
    RequestMetadata,
    limit_of,
    read_metadata,
    refuse,
    refuse_deadline,
)
from engine_agent.protocol.load_messages import OTHER_TENANTS
from engine_agent.protocol.states import Phase, ServingClass
from tests.engine_agent.cell_proxy.engine import Turn, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

REALTIME, NEAR, BATCH = ServingClass


@pytest.mark.parametrize(
    ("phase", "healthy", "in_flight", "code"),
    [
        (Phase.SERVE, True, 0, None),
        (Phase.SERVE, True, 4, None),
        (Phase.SERVE, True, 7, None),
        (Phase.SERVE, True, 8, "cell_saturated"),
        (Phase.SERVE, False, 0, "engine_unhealthy"),
        (Phase.SERVE, False, 8, "engine_unhealthy"),
        (Phase.DRAIN, True, 0, "cell_draining"),
        (Phase.DRAIN, False, 0, "cell_draining"),
        (Phase.STOP, True, 0, "cell_draining"),
    ],
)
def test_admission(phase: Phase, healthy: bool, in_flight: int, code: str | None) -> None:
    refusal = refuse(REALTIME, phase=phase, healthy=healthy, reason="gone", in_flight=in_flight, limit=8)
    assert (refusal.code if refusal else None) == code
    assert refusal is None or (refusal.status, refusal.retry) == (503, True)


@pytest.mark.parametrize(
    ("serving_class", "max_concurrency", "urgent_recently", "limit"),
    [
        (REALTIME, 64, True, 128),
        (REALTIME, 64, False, 128),
        (NEAR, 64, True, 57),
        (NEAR, 64, False, 96),
        (BATCH, 64, True, 48),
        (BATCH, 64, False, 96),
        (BATCH, 4, True, 3),
        (NEAR, 4, True, 3),
        (BATCH, 2, True, 1),
        (BATCH, 1, True, 1),
        (BATCH, 1, False, 2),
    ],
)
def test_slots_are_closed_to_the_less_urgent_while_the_urgent_come(
    serving_class: ServingClass, max_concurrency: int, urgent_recently: bool, limit: int
) -> None:
    assert limit_of(serving_class, max_concurrency=max_concurrency, urgent_recently=urgent_recently) == limit


def test_however_much_batch_work_there_is_a_real_time_request_finds_a_slot() -> None:
    for max_concurrency in range(2, 300):
        urgent = limit_of(REALTIME, max_concurrency=max_concurrency, urgent_recently=False)
        for urgent_recently, most in ((True, max_concurrency), (False, urgent)):
            near = limit_of(NEAR, max_concurrency=max_concurrency, urgent_recently=urgent_recently)
            batch = limit_of(BATCH, max_concurrency=max_concurrency, urgent_recently=urgent_recently)
            assert 1 <= batch <= near < most, f"{max_concurrency=} {urgent_recently=}"


@pytest.mark.parametrize(
    ("time_left_s", "ttft_p50_s", "samples", "code"),
    [
        (1.0, None, 0, None),
        (1.0, 0.5, 100, None),
        (1.0, 1.5, 100, "deadline_unreachable"),
        (1.0, 1.5, 19, None),
        (0.0, None, 0, "deadline_exceeded"),
        (-2.0, 0.1, 100, "deadline_exceeded"),
    ],
)
def test_what_cannot_be_in_time_is_not_begun(
    time_left_s: float, ttft_p50_s: float | None, samples: int, code: str | None
) -> None:
    refusal = refuse_deadline(time_left_s, ttft_p50_s=ttft_p50_s, samples=samples)
    assert (refusal.code if refusal else None) == code


ANSWER = json_answer(b'{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5}}')


async def in_flight_is(proxy: ProxyProcess, count: int) -> bool:
    return bool((await proxy.status())["in_flight"] == count)


def batch(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="batch", x_switchyard_tenant="acme"))


def soon(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="near_realtime"))


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
async def test_the_engine_is_told_the_priority_of_a_class_whatever_the_client_says() -> None:
    body = json.dumps({"model": "tiny", "priority": -100}).encode()
    async with running_engine() as engine, running_proxy(engine, "--priorities") as proxy:
        for serving_class in ("realtime", "near_realtime", "batch"):
            await proxy.complete(body, x_switchyard_class=serving_class)
        assert [json.loads(seen.body)["priority"] for seen in engine.requests] == [0, 100, 200]


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_engine_without_priorities_is_told_none() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await proxy.complete(b'{"model":"tiny"}', x_switchyard_class="batch")
        assert engine.requests[0].body == b'{"model":"tiny"}'


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_body_of_any_length_is_checked_and_gets_its_priority() -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 3_000_000}).encode()
    async with running_engine() as engine, running_proxy(engine, "--priorities") as proxy:
        assert (await proxy.complete(body, x_switchyard_class="batch")).status == 200
        assert json.loads(engine.requests[0].body) == {**json.loads(body), "priority": 200}
        refused = await proxy.complete(body[:-1] + b',"vllm_xargs":{"a":1}}')
        assert (refused.status, refused.json()["error"]["param"]) == (400, "vllm_xargs")
        assert len(engine.requests) == 1


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_class_that_does_not_exist_is_refused_by_name() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        answer = await proxy.ask(request("/v1/completions", b"{}", x_switchyard_class="urgent"))
        assert (answer.status, answer.json()["error"]["code"]) == (400, "bad_header")
        assert engine.requests == []


NOW = 1_795_286_000.0


def test_without_headers_a_request_is_real_time_and_nobodys() -> None:
    assert read_metadata({b"content-type": b"application/json"}, NOW) == RequestMetadata(
        ServingClass.REALTIME, "", None
    )


def test_all_three_are_read() -> None:
    headers = {
        b"x-switchyard-class": b"batch",
        b"x-switchyard-tenant": b"acme",
        b"x-switchyard-deadline-ms": b"1500",
    }
    assert read_metadata(headers, NOW) == RequestMetadata(ServingClass.BATCH, "acme", 1.5)


@pytest.mark.parametrize(("value", "key"), [(b"0a1b2c3d", "0a1b2c3d"), (b"", ""), (b"0A1B", ""), (b"x" * 99, "")])
def test_the_prefix_of_a_key_is_read_and_nothing_else_taken_for_one(value: bytes, key: str) -> None:
    assert read_metadata({b"x-switchyard-key": value}, NOW).key == key


def test_an_ingress_says_that_it_chose_the_deployment() -> None:
    assert read_metadata({b"x-switchyard-deployment": b"chat-v2"}, NOW).is_routed


@pytest.mark.parametrize("tenant", [b"a b", b"", b"x" * 65, "ä".encode(), b'x"', b"~others"])
def test_a_name_that_no_tenant_has_is_counted_among_the_others(tenant: bytes) -> None:
    assert read_metadata({b"x-switchyard-tenant": tenant}, NOW).tenant == OTHER_TENANTS


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        (b"x-switchyard-class", b"urgent", "one of realtime, near_realtime, batch"),
        (b"x-switchyard-deadline-ms", b"soon", "the milliseconds left, a whole number"),
        (b"x-switchyard-deadline-ms", b"1.5", "a whole number"),
        (b"x-switchyard-deadline-ms", b"9" * 11, "a whole number"),
    ],
)
def test_a_header_that_says_nothing_sensible_is_refused_by_name(name: bytes, value: bytes, right: str) -> None:
    with pytest.raises(BadHeader, match=right) as caught:
        read_metadata({name: value}, NOW)
    assert caught.value.refusal.status == 400
    assert name.decode() in caught.value.refusal.message.lower()


@pytest.mark.parametrize(
    ("arrived", "left_s"),
    [(b"1795285999500", 1.0), (b"1795285990000", -8.5), (b"1795286009000", 1.5), (b"soon", 1.5), (b"5", 1.5)],
)
def test_what_a_request_waited_at_its_ingress_is_taken_off_its_time(arrived: bytes, left_s: float) -> None:
    headers = {b"x-switchyard-deadline-ms": b"1500", b"x-switchyard-arrived-ms": arrived}
    assert read_metadata(headers, NOW).time_left_s == left_s
