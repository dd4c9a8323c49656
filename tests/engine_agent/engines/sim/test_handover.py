"""A prompt that one engine reads and another answers: where it lies, how long it is kept, and what fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_agent.engines.openai_http import Endpoint
from engine_agent.engines.sim.batching import BatchingModel, Handover, ModelParameters, Sequence
from engine_agent.engines.sim.kv_transfer import KvServer, Leases
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.sim.in_process import FAST, MODEL, Application, application
from tests.ports import free_port

CHAT = "/v1/chat/completions"
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
LONG = [{"role": "user", "content": "a long story of many words " * 40}]
PREFILL = HandoverParameters(CellRole.PREFILL)
DECODE = HandoverParameters(CellRole.DECODE, base_ms=0, mb_per_token=0)


@asynccontextmanager
async def pair(prefill: HandoverParameters = PREFILL) -> AsyncIterator[tuple[Application, Application]]:
    place = Endpoint("127.0.0.1", free_port())
    async with application(FAST, prefill, place) as reads, application(FAST, DECODE) as answers:
        link = asyncio.create_task(KvServer(place, reads.engine.leases).run())
        await asyncio.sleep(0)  # it has begun
        try:
            yield reads, answers
        finally:
            link.cancel()
            await asyncio.wait([link])


async def prefilled(reads: Application) -> Any:
    return await reads.ask(CHAT, messages=LONG, max_tokens=1, kv_transfer_params=TO_PREFILL)


def test_a_pair_answers_as_one_engine_does() -> None:
    async def scenario() -> None:
        async with pair() as (reads, answers):
            whole = await answers.ask(CHAT, messages=LONG, max_tokens=20)
            params = (await prefilled(reads))["kv_transfer_params"]
            assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, whole["usage"]["prompt_tokens"])
            together = await answers.ask(CHAT, messages=LONG, max_tokens=20, kv_transfer_params=params)
            assert together["choices"] == whole["choices"]
            assert answers.meters.external_hits == params["remote_num_tokens"] - 1
            assert reads.engine.gauges().kept == 0
            assert reads.engine.gauges().expired == 0

    asyncio.run(scenario())


def test_what_was_read_is_kept_once_and_then_read_again() -> None:
    async def scenario() -> None:
        async with pair() as (reads, answers):
            params = (await prefilled(reads))["kv_transfer_params"]
            assert reads.engine.gauges().kept == 1
            for failed in (0, 1):
                await answers.ask(CHAT, messages=LONG, max_tokens=2, kv_transfer_params=params)
                assert answers.meters.failed_transfers == failed

    asyncio.run(scenario())


def test_a_prefill_engine_that_is_gone_costs_a_reading() -> None:
    async def scenario() -> None:
        async with pair() as (reads, answers):
            gone = {**(await prefilled(reads))["kv_transfer_params"], "remote_port": free_port()}
            answer = await answers.ask(CHAT, messages=LONG, max_tokens=2, kv_transfer_params=gone)
            assert answer["usage"]["completion_tokens"] == 2
            assert answers.meters.failed_transfers == 1

    asyncio.run(scenario())


def test_no_block_is_kept_after_its_lease() -> None:
    async def scenario() -> None:
        async with pair(HandoverParameters(CellRole.PREFILL, lease_s=0.01)) as (reads, _):
            for _each in range(3):
                await prefilled(reads)
            async with asyncio.timeout(30):
                while reads.engine.gauges().kept:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            assert reads.engine.gauges().expired == 3
            assert reads.engine.gauges().kv_cache_usage == 0

    asyncio.run(scenario())


def test_a_client_that_leaves_a_prefill_engine_leaves_nothing() -> None:
    async def scenario() -> None:
        slow = ModelParameters(prefill_tokens_per_s=1e3)
        async with application(slow, PREFILL, Endpoint("127.0.0.1", free_port())) as reads:
            body = {"model": MODEL, "messages": LONG, "max_tokens": 1, "kv_transfer_params": TO_PREFILL}
            asking = asyncio.create_task(reads.send(CHAT, json.dumps(body).encode()))
            while not reads.engine.in_flight:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert (reads.engine.in_flight, reads.engine.gauges().kept) == (0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": LONG, "n": 2}),
        ("/v1/completions", {"prompt": ["one", "two two"]}),
        (CHAT, {"messages": LONG, "stream": True}),
    ],
)
def test_only_one_answer_to_one_prompt_is_handed_over(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with pair() as (reads, answers):
            sent = json.dumps({"model": MODEL, "max_tokens": 1, "kv_transfer_params": TO_PREFILL, **body}).encode()
            status, answer = await reads.send(path, sent)
            assert (status, json.loads(answer)["error"]["param"]) == (400, "kv_transfer_params")
            assert (await answers.send(path, sent))[0] == 200, "an engine of another role ignores it"

    asyncio.run(scenario())


def test_a_prompt_that_lies_nowhere_is_refused() -> None:
    async def scenario() -> None:
        async with pair() as (_, answers):
            sent = {"model": MODEL, "messages": LONG, "kv_transfer_params": {"do_remote_prefill": True}}
            status, answer = await answers.send(CHAT, json.dumps(sent).encode())
            assert status == 400
            assert "remote_request_id" in json.loads(answer)["error"]["message"]

    asyncio.run(scenario())


def test_a_lease_is_renewed_by_whoever_waits() -> None:
    now, forgotten = [0.0], list[str]()
    leases = Leases(HandoverParameters(CellRole.PREFILL), forgotten.append, lambda: now[0])
    leases.keep("seq-1", 100)
    request = leases.request_of("seq-1") or ""
    now[0] = 25.0
    assert leases.renew(request) == 100
    now[0] = 44.0
    leases.expire()
    assert forgotten == []
    now[0] = 45.0
    leases.expire()
    assert (forgotten, leases.expired, leases.renew(request), leases.free(request)) == (["seq-1"], 1, None, False)


def test_the_time_model_reads_the_last_token_of_a_prompt_that_was_taken_over() -> None:
    model = BatchingModel(ModelParameters(step_jitter=0))
    model.submit(Sequence("d", 3000, 2, handover=Handover(taken_over=3000)))
    step = model.begin_step(0.0)
    assert step is not None
    assert (step.prefilled, step.yielding, step.admitted) == ({"d": 1}, ("d",), {"d": 2999})


def test_the_time_model_frees_what_was_kept() -> None:
    model = BatchingModel(ModelParameters(kv_capacity_tokens=100))
    model.submit(Sequence("p", 90, 1, handover=Handover(is_kept=True)))
    model.submit(Sequence("q", 90, 1))
    model.begin_step(0.0)
    model.finish_step()
    assert (model.kept, model.kv_reserved_tokens, model.begin_step(1.0)) == (1, 91, None)
    assert model.forget("p")
    assert not model.forget("p")
    assert model.kv_reserved_tokens == 0
    assert model.begin_step(1.0) is not None


def test_a_handover_takes_a_while() -> None:
    assert HandoverParameters().handover_s(3000) == pytest.approx(0.005 + 3000 * 0.33e6 / 12.5e9)
