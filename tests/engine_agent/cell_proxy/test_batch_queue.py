"""One batch prompt is read at a time, in a real proxy before an engine that does as the test says."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.engine_agent.cell_proxy.engine import DONE, EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

ANSWER = json_answer(b'{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5}}')


def batch(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="batch"))


def answers_after(go_on: asyncio.Event) -> Callable[[Turn], Awaitable[None]]:
    """An engine that answers once it may."""

    async def script(turn: Turn) -> None:
        await go_on.wait()
        await turn.send(ANSWER)

    return script


async def stands(proxy: ProxyProcess, running: int, waiting: int) -> bool:
    load = (await proxy.status())["load"]["batch"]
    return (load.get("running", 0), load.get("waiting", 0)) == (running, waiting)


async def test_the_next_prompt_goes_to_the_engine_with_the_first_token_of_the_one_before() -> None:
    first_token, end = asyncio.Event(), asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        await first_token.wait()
        await turn.send(chunk(EVENTS[0]))
        await end.wait()
        await turn.send(chunk(DONE) + b"0\r\n\r\n")

    async with running_engine(script) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        hold = asyncio.Event()
        engine.ledger["/switchyard/read"] = json_answer(b"{}", b"202 Accepted")
        answers = [batch(proxy)]
        await until(lambda: stands(proxy, 1, 0), "one is in the engine")
        answers += [batch(proxy), batch(proxy)]
        await until(lambda: stands(proxy, 1, 2), "two wait")
        refused = await batch(proxy)
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert "as much batch work" in refused.json()["error"]["message"]
        assert len(engine.requests) == 1
        first_token.set()
        await until(lambda: stands(proxy, 3, 0), "all run, each begun when the one before had its first token")
        end.set()
        hold.set()
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 3


async def test_an_engine_that_tells_when_a_prompt_is_read_is_asked_where_the_answer_is_no_stream() -> None:
    go_on = asyncio.Event()
    async with running_engine(answers_after(go_on)) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        engine.ledger["/switchyard/read"] = json_answer(b"{}", b"202 Accepted")
        answers = [batch(proxy), batch(proxy)]
        await until(lambda: stands(proxy, 1, 1), "the second waits for the first prompt")
        engine.ledger["/switchyard/read"] = json_answer(b"{}")
        await until(lambda: stands(proxy, 2, 0), "both prompts are read")
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 2


async def test_without_a_word_of_the_engine_a_prompt_counts_as_read_after_a_while() -> None:
    go_on = asyncio.Event()
    async with running_engine(answers_after(go_on)) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        answers = [batch(proxy), batch(proxy), batch(proxy)]
        await until(lambda: stands(proxy, 3, 0), "one after the other")
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 3


async def test_who_waits_and_leaves_takes_nobodys_place() -> None:
    go_on = asyncio.Event()
    async with running_engine(answers_after(go_on)) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        engine.ledger["/switchyard/read"] = json_answer(b"{}", b"202 Accepted")
        first = batch(proxy)
        await until(lambda: stands(proxy, 1, 0), "one is in the engine")
        gone, last = batch(proxy), batch(proxy)
        await until(lambda: stands(proxy, 1, 2), "two wait")
        gone.cancel()
        await until(lambda: stands(proxy, 1, 1), "one has left")
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(first, last)] == [200] * 2
        await until(lambda: stands(proxy, 0, 0), "nobody is there")
        assert len(engine.requests) == 2


async def test_an_engine_that_orders_classes_gets_several_prompts_at_once() -> None:
    go_on = asyncio.Event()
    async with (
        running_engine(answers_after(go_on)) as engine,
        running_proxy(engine, "--orders-classes", max_concurrency=8) as proxy,
    ):
        engine.ledger["/switchyard/read"] = json_answer(b"{}", b"202 Accepted")
        answers = [batch(proxy), batch(proxy), batch(proxy)]
        await until(lambda: stands(proxy, 3, 0), "all are in the engine, none of them read")
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 3
