"""The batch window by example: it grows while real-time latency stays low, and shrinks otherwise."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.batch_window import (
    FIRST,
    STEPS_LEAST,
    WAITING,
    BatchAdmission,
    BatchWindow,
    RealtimeLatency,
    decide_batch,
)
from tests.engine_agent.cell_proxy.engine import DONE, EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

CALM = RealtimeLatency(0.2, 0.03)
SLOW = RealtimeLatency(0.5, 0.03)
seconds = st.none() | st.floats(0.001, 60)
steps = st.lists(st.tuples(st.builds(RealtimeLatency, seconds, seconds), st.booleans(), st.booleans()), max_size=60)


def learnt(most: int = 48) -> BatchWindow:
    window = BatchWindow(most)
    for _ in range(3):
        window.steer(CALM, had_batch=False, was_full=False)
    return window


@pytest.mark.parametrize(
    ("running", "unread", "waiting", "limit", "decided"),
    [
        (0, 0, 0, 8, BatchAdmission.BEGIN),
        (7, 0, 0, 8, BatchAdmission.BEGIN),
        (8, 0, 0, 8, BatchAdmission.WAIT),
        (50, 0, 0, None, BatchAdmission.BEGIN),
        (1, 1, 0, None, BatchAdmission.WAIT),
        (1, 1, 1, 8, BatchAdmission.WAIT),
        (1, 0, 1, 8, BatchAdmission.WAIT),
        (1, 1, WAITING, 8, BatchAdmission.REFUSE),
    ],
)
def test_a_request_begins_where_no_prompt_is_read_and_the_window_has_room(
    running: int, unread: int, waiting: int, limit: int | None, decided: BatchAdmission
) -> None:
    assert decide_batch(running=running, unread=unread, waiting=waiting, limit=limit) is decided


def test_it_doubles_while_it_is_full_and_real_time_requests_do_not_mind() -> None:
    window = learnt()
    sizes = []
    for was_full in (True, False, True, True):
        window.steer(CALM, had_batch=True, was_full=was_full)
        sizes.append(window.limit)
    assert sizes == [2 * FIRST, 2 * FIRST, 4 * FIRST, 48]


def test_it_shrinks_by_a_quarter_when_they_do_is_judged_anew_after_that_and_grows_by_a_quarter() -> None:
    window = learnt()
    sizes = []
    for _ in range(2 * STEPS_LEAST):
        window.steer(SLOW, had_batch=True, was_full=False)
        sizes.append(window.limit)
    assert sizes == [8, 8, 6, 6, 6, 4]
    assert window.is_over_budget
    window.steer(CALM, had_batch=True, was_full=True)
    assert window.limit == 5
    assert not window.is_over_budget


def test_one_slow_step_among_good_ones_is_no_reason() -> None:
    window = learnt()
    for measured in (CALM, CALM, CALM, SLOW, CALM):
        window.steer(measured, had_batch=True, was_full=False)
        assert not window.is_over_budget


def test_the_baseline_is_learnt_without_batch_work_and_rises_slowly_with_it() -> None:
    window = learnt()
    for _ in range(20):
        window.steer(SLOW, had_batch=True, was_full=False)
    assert window.baseline.ttft_s == pytest.approx(0.2 * 1.005**20)
    for _ in range(20):
        window.steer(SLOW, had_batch=False, was_full=False)
    assert window.baseline.ttft_s == pytest.approx(0.5, abs=0.01)


def test_too_few_samples_change_nothing() -> None:
    window = learnt()
    for _ in range(9):
        window.steer(RealtimeLatency(), had_batch=True, was_full=False)
    assert (window.limit, window.baseline, window.is_over_budget) == (FIRST, CALM, False)


@given(st.integers(1, 200), steps)
def test_at_least_one_and_at_most_the_most_may_run_whatever_is_measured(
    most: int, measured: list[tuple[RealtimeLatency, bool, bool]]
) -> None:
    window = BatchWindow(most)
    for latency, had_batch, was_full in measured:
        window.steer(latency, had_batch=had_batch, was_full=was_full)
        assert 1 <= window.limit <= most


ANSWER = json_answer(b'{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":9,"completion_tokens":5}}')


def batch(proxy: ProxyProcess) -> "asyncio.Task[Message]":
    return asyncio.create_task(proxy.complete(x_switchyard_class="batch"))


def answers_after(go_on: asyncio.Event) -> Callable[[Turn], Awaitable[None]]:
    """An engine that answers when the test allows it."""

    async def script(turn: Turn) -> None:
        await go_on.wait()
        await turn.send(ANSWER)

    return script


async def stands(proxy: ProxyProcess, running: int, waiting: int) -> bool:
    load = (await proxy.status())["load"]["batch"]
    return (load.get("running", 0), load.get("waiting", 0)) == (running, waiting)


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
async def test_without_a_word_of_the_engine_a_prompt_counts_as_read_after_a_while() -> None:
    go_on = asyncio.Event()
    async with running_engine(answers_after(go_on)) as engine, running_proxy(engine, max_concurrency=8) as proxy:
        answers = [batch(proxy), batch(proxy), batch(proxy)]
        await until(lambda: stands(proxy, 3, 0), "one after the other")
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 3


@pytest.mark.processes
@pytest.mark.asyncio
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


@pytest.mark.processes
@pytest.mark.asyncio
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
