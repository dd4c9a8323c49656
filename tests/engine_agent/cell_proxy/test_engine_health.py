"""Health from probes, connections and tokens. Time is an argument; nothing waits."""

import asyncio
import os
from time import monotonic

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.health import EngineHealth
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.probes import Prober
from engine_agent.cell_proxy.settings import ProbeTimes, ProxySettings
from engine_agent.protocol.messages import GoldenPrompt
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import proxy_of
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until

TIMES = ProbeTimes()


def fresh() -> EngineHealth:
    return EngineHealth(TIMES, max_concurrency=2)


def healthy() -> EngineHealth:
    health = fresh()
    health.answered(0.0, 1.0)
    health.token_seen(0.1)
    return health


def test_a_new_engine_is_healthy_only_after_a_good_probe_and_a_token() -> None:
    health = fresh()
    assert (health.ok, health.reason) == (False, "the engine was not probed yet")
    assert not health.token_probe_due(0.0, in_flight=0)
    health.answered(1.0, 2.5)
    assert (health.ok, health.reason) == (False, "no token came out of the engine yet")
    assert health.token_probe_due(1.0, in_flight=0)
    health.token_seen(1.2)
    assert (health.ok, health.reason) == (True, "")


def test_one_refused_connection_is_enough_and_a_token_is_asked_for_again() -> None:
    health = healthy()
    health.failed(1.0, "refused")
    assert (health.ok, health.reason) == (False, "refused")
    health.answered(2.0, 1.0)
    assert not health.ok
    assert health.token_probe_due(2.0, in_flight=0)
    health.token_seen(2.1)
    assert health.ok


def test_one_slow_probe_is_forgiven_and_two_in_a_row_are_not() -> None:
    health = healthy()
    health.timed_out(1.0)
    assert health.ok
    health.answered(2.0, 900.0)
    health.timed_out(3.0)
    assert health.ok
    health.timed_out(4.0)
    assert not health.ok


def test_after_a_pause_one_good_probe_is_enough() -> None:
    health = healthy()
    health.timed_out(1.0)
    health.timed_out(2.0)
    health.answered(3.0, 1.0)
    assert health.ok


def test_a_token_of_a_client_does_not_revive_an_engine_that_does_not_answer() -> None:
    health = healthy()
    health.failed(1.0, "refused")
    health.token_seen(1.1)
    assert not health.ok


def test_a_failed_token_probe_makes_a_live_engine_unhealthy_until_a_token_comes() -> None:
    health = healthy()
    health.token_failed(1.0, "no token within 10 s")
    health.answered(1.2, 1.0)
    assert (health.ok, health.reason) == (False, "no token within 10 s")
    health.token_seen(1.4)
    assert health.ok


@pytest.mark.parametrize(
    ("silent_s", "in_flight", "due"),
    [(9.9, 0, False), (10.0, 0, True), (10.0, 1, True), (10.0, 2, False), (1000.0, 2, False)],
)
def test_a_token_is_asked_for_after_ten_silent_seconds_while_a_slot_is_free(
    silent_s: float, in_flight: int, due: bool
) -> None:
    health = healthy()
    assert health.token_probe_due(0.1 + silent_s, in_flight) is due


def test_a_failing_token_probe_is_repeated_once_a_second() -> None:
    health = fresh()
    health.answered(0.0, 1.0)
    health.token_probed(0.0)
    health.token_failed(0.1, "500")
    assert not health.token_probe_due(0.9, in_flight=0)
    assert health.token_probe_due(1.0, in_flight=0)


def test_the_time_of_being_bad_runs_from_the_first_failure() -> None:
    health = healthy()
    assert health.bad_for_s(5.0) == 0.0
    health.failed(5.0, "refused")
    health.failed(8.0, "refused")
    assert health.bad_for_s(9.0) == 4.0


def test_health_carries_the_age_of_the_last_probe() -> None:
    health = healthy()
    reported = health.report(0.25)
    assert (reported.ok, reported.reason, reported.probe_ms, reported.checked_s_ago) == (True, "", 1.0, 0.25)
    assert fresh().report(1.0).checked_s_ago is None


def with_golden() -> EngineHealth:
    health = EngineHealth(TIMES, max_concurrency=2, has_golden=True)
    health.answered(0.0, 1.0)
    return health


def test_an_engine_with_golden_prompts_is_healthy_once_it_answered_them() -> None:
    health = with_golden()
    assert health.golden_due(0.0)
    assert not health.token_probe_due(0.0, in_flight=0)
    health.token_seen(0.1)
    assert (health.ok, health.reason) == (False, "its golden prompts were not answered yet")
    health.golden_passed(0.2)
    assert health.ok
    assert not health.golden_due(60.0)


def test_a_wrong_answer_is_asked_for_once_more_and_then_condemns_the_start() -> None:
    health = with_golden()
    health.token_probed(0.0)
    health.golden_wrong(0.1, "it said London")
    assert not health.report(0.1).wrong
    assert not health.golden_due(0.1)
    assert health.golden_due(1.0)
    health.golden_wrong(1.1, "it said London")
    assert (health.report(1.1).wrong, health.reason) == (True, "it said London")
    assert not health.golden_due(60.0)


def test_a_wrong_answer_after_which_it_answers_well_is_forgotten() -> None:
    health = with_golden()
    health.golden_wrong(0.1, "it said London")
    health.golden_passed(1.1)
    assert health.ok
    assert not health.report(1.1).wrong


def test_golden_prompts_wait_for_an_engine_that_is_down_and_are_not_asked_twice() -> None:
    health = with_golden()
    health.failed(0.1, "refused")
    assert not health.golden_due(10.0)
    health.answered(11.0, 1.0)
    assert health.golden_due(11.0)
    health.golden_passed(11.1)
    health.failed(12.0, "refused")
    health.answered(13.0, 1.0)
    assert not health.golden_due(13.0)
    assert health.token_probe_due(13.0, in_flight=0)


GOLDEN = '[{"prompt": "The capital of France is", "expect": "Paris"}]'


def says(text: str) -> bytes:
    return json_answer(b'{"choices":[{"text":"%b"}],"usage":{"completion_tokens":2}}' % text.encode())


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_engine_that_answers_as_it_must_is_healthy() -> None:
    async with running_engine() as engine:
        engine.token = says(" Paris, of course")
        async with running_proxy(engine, "--golden", GOLDEN) as proxy:
            assert (await proxy.status())["health"]["wrong"] is False
            assert engine.token_probes == 1


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_engine_that_answers_wrong_twice_is_never_routed_and_says_what_it_said() -> None:
    async with running_engine() as engine:
        engine.token = says(" London")
        async with running_proxy(engine, "--golden", GOLDEN, wait=False) as proxy:
            await until(lambda: engine.token_probes == 2, "it is asked twice")

            async def is_condemned() -> bool:
                return bool((await proxy.status())["health"]["wrong"])

            await until(is_condemned, "the wrong answers condemn it")
            said = (await proxy.status())["health"]["reason"]
            assert said == "golden prompt 'The capital of France is' is answered ' London' without 'Paris'"
            assert await proxy.health_check() == (503, f"the cell's engine is not healthy: {said}")
            assert (await proxy.complete()).status == 503
            assert engine.token_probes == 2


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_engine_that_fails_on_a_golden_prompt_is_asked_again() -> None:
    async with running_engine() as engine:
        engine.token = json_answer(b'{"reason":"warming up"}', b"500 Internal Server Error")
        async with running_proxy(engine, "--golden", GOLDEN, wait=False) as proxy:
            await until(lambda: engine.token_probes > 0, "it is asked")
            engine.token = says(" Paris")
            await until(proxy.is_healthy, "it answers")


@pytest.mark.processes
@pytest.mark.asyncio
async def test_its_answer_may_take_longer_than_one_token() -> None:
    """An engine on shared cores takes 19 s instead of one: slow, and correct."""
    golden = (GoldenPrompt(prompt="The capital of France is", expect="Paris"),)
    times = ProbeTimes(token_timeout_s=0.0, token_interval_s=1000.0)
    null = os.open(os.devnull, os.O_WRONLY)
    async with running_engine() as engine:
        engine.token = says(" Paris")
        address = ("127.0.0.1", engine.port, "tiny", 4)
        settings = ProxySettings("n-1", "c-1", 1, "127.0.0.1", 0, 0, *address, golden=golden, probes=times)
        cell = Cell(settings, LineLog(null, requests=False))
        probing = asyncio.create_task(Prober(cell).run())
        await until(lambda: cell.health.ok, "it is healthy")
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        cell.pool.close()
    os.close(null)


@pytest.mark.asyncio
async def test_a_request_that_cannot_connect_has_the_engine_probed_and_marks_nothing() -> None:
    async with proxy_of() as proxy:
        looked = asyncio.Event()
        proxy.cell.request_probe = looked.set
        await proxy.engine.die()
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        answer = await read_message(reader)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")
        assert answer.json()["error"]["code"] == "engine_unreachable"
        assert proxy.cell.health.ok
        assert looked.is_set()
        writer.close()


@pytest.mark.asyncio
async def test_tokens_of_a_stream_prove_an_engine_that_answers_again() -> None:
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await go_on.wait()
        await turn.send(chunk(EVENTS[1]))
        await turn.gone.wait()

    async with proxy_of(script) as proxy:
        reader, writer = await proxy.send(request("/v1/completions", b"{}"))
        await read_head(reader)
        assert await read_chunk(reader) == EVENTS[0]
        proxy.cell.health.failed(monotonic(), "unready")
        proxy.cell.health.answered(monotonic(), 1.0)
        assert proxy.cell.status().health.ok is False
        go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        assert proxy.cell.status().health.ok is True
        writer.close()
