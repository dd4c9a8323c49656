"""The limits of a key, requests and tokens per minute and concurrent requests, counted by a real HAProxy."""

import asyncio
import contextlib
import itertools
import math
from typing import Any

import httpx
import msgspec
import openai
import pytest

from engine_agent.ingress.report import KEY_COUNTS_COMMAND, read_key_counts
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool
from tests.engine_agent.ingress.keyed import Keyed, keyed
from tests.engine_agent.ingress.traffic import BODY

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

STREAM = BODY[:-1] + b', "stream": true}'
PROMPT = math.ceil(len(BODY) / 4)
INITIAL_ESTIMATE = 256
"""Assumed tokens of a key's first answer, as in limits.lua."""
REFILL = 30
"""Tokens that are refilled in the 1.8 s that a test can take on a slow machine."""
DEADLINE_S = 60.0
_numbers = itertools.count(1)


@pytest.fixture
def ingress(shared_ingress: RunningIngress) -> RunningIngress:
    return shared_ingress


def fresh(**limits: Any) -> Keyed:
    """A key for one test: the tests share HAProxy, which counts by key."""
    return keyed(f"{next(_numbers):08x}", **limits)


async def route(ingress: RunningIngress, cell: FakeCell, *keys: Keyed) -> None:
    await ingress.route(pool(cell), keys=tuple(key.entry for key in keys))
    await ingress.sees(**{cell.name: "up"})


def rate_limit(response: httpx.Response, kind: str) -> tuple[str, ...]:
    return tuple(response.headers[f"x-ratelimit-{what}-{kind}"] for what in ("limit", "remaining", "reset"))


async def test_requests_over_the_limit_are_told_when_to_come_back_in_the_form_the_client_knows(
    ingress: RunningIngress,
) -> None:
    limited, free = fresh(requests_per_min=3), fresh()
    client = openai.AsyncOpenAI(base_url=f"{ingress.url}/v1", api_key=limited.text, max_retries=0)
    async with client, FakeCell().running() as cell:
        await route(ingress, cell, limited, free)
        answers = [await ingress.post(BODY, **limited.headers) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        limit, remaining, reset = rate_limit(answers[0], "requests")
        assert (limit, remaining) == ("3", "2")
        assert 19 < float(reset.removesuffix("s")) <= 20
        error = answers[3].json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("requests", None, "rate_limit_exceeded")
        assert "Rate limit reached on requests per min: Limit 3, Used 3, Requested 1" in error["message"]
        assert 18 <= int(answers[3].headers["retry-after"]) <= 20
        assert rate_limit(answers[3], "requests")[1] == "0"
        unlimited = await ingress.post(BODY, **free.headers)
        assert unlimited.status_code == 200
        assert "x-ratelimit-limit-requests" not in unlimited.headers
        with pytest.raises(openai.RateLimitError):
            await ask(client)


async def test_what_is_refused_for_its_body_counts_too_and_over_the_limit_none_is_read(ingress: RunningIngress) -> None:
    key = fresh(requests_per_min=3)
    async with FakeCell().running() as cell:
        await route(ingress, cell, key)
        for body, status in ((b"{", 400), (b'{"model": "nobody"}', 404), (BODY, 200), (b"{", 429), (BODY, 429)):
            assert (await ingress.post(body, **key.headers)).status_code == status


async def test_tokens_are_settled_by_what_was_really_generated(ingress: RunningIngress) -> None:
    key = fresh(tokens_per_min=1000)
    async with FakeCell().running() as cell:
        cell.usage = {"prompt_tokens": 30, "completion_tokens": 20, "total_tokens": 50}
        await route(ingress, cell, key)
        first = await ingress.post(BODY, **key.headers)
        assert rate_limit(first, "tokens")[:2] == ("1000", str(1000 - PROMPT - INITIAL_ESTIMATE))
        second = await ingress.post(BODY, **key.headers)
        expected = 1000 - 50 - PROMPT - 20  # the mean of answers is the next guess
        assert expected <= int(rate_limit(second, "tokens")[1]) <= expected + REFILL
        cell.usage = {"prompt_tokens": 30, "completion_tokens": 900, "total_tokens": 930}
        await ingress.post(BODY, **key.headers)
        refused = await ingress.post(BODY, **key.headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        assert int(refused.headers["retry-after"]) > 1


async def test_tokens_of_streams_count_by_usage_or_by_events_and_the_client_says_how_many_it_wants(
    ingress: RunningIngress,
) -> None:
    by_usage, by_events = fresh(tokens_per_min=400), fresh(tokens_per_min=400)
    async with FakeCell(chunks=3).running() as cell:
        await route(ingress, cell, by_usage, by_events)
        for key, usage in ((by_usage, {"completion_tokens": 390, "total_tokens": 395}), (by_events, None)):
            cell.usage = usage
            assert (await ingress.post(STREAM, **key.headers)).status_code == 200
        body = b'{"model": "demo", "messages": [], "max_tokens": 2}'
        assert (await ingress.post(body, **by_usage.headers)).status_code == 429
        left = await ingress.post(body, **by_events.headers)
        assert left.status_code == 200
        assert int(rate_limit(left, "tokens")[1]) > 340


async def test_every_answer_to_a_prompt_is_charged(ingress: RunningIngress) -> None:
    key = fresh(tokens_per_min=1000)
    body = b'{"model": "demo", "messages": [], "max_tokens": 20, "n": 40}'
    async with FakeCell().running() as cell:
        cell.usage = {"prompt_tokens": 5, "completion_tokens": 800, "total_tokens": 805}
        await route(ingress, cell, key)
        assert (await ingress.post(body, **key.headers)).status_code == 200
        refused = await ingress.post(body, **key.headers)
        assert refused.status_code == 429
        assert f"Requested {math.ceil(len(body) / 4) + 800}" in refused.json()["error"]["message"]


async def test_a_request_larger_than_a_minutes_tokens_passes_when_all_are_there_and_leaves_a_debt(
    ingress: RunningIngress,
) -> None:
    key = fresh(tokens_per_min=60)
    large = b'{"model": "demo", "messages": [{"role": "user", "content": "%s"}], "max_tokens": 1}' % (b"x" * 4000)
    async with FakeCell().running() as cell:
        cell.usage = {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001}
        await route(ingress, cell, key)
        assert (await ingress.post(large, **key.headers)).status_code == 200
        refused = await ingress.post(BODY, **key.headers)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 900


async def test_an_answer_that_failed_or_never_came_costs_no_tokens(ingress: RunningIngress) -> None:
    key = fresh(tokens_per_min=1000)
    async with FakeCell().running() as cell:
        await route(ingress, cell, key)
        cell.refuses = True
        assert (await ingress.post(BODY, **key.headers)).status_code == 503
        cell.refuses = False
        async with asyncio.timeout(DEADLINE_S):
            while (answer := await ingress.post(BODY, **key.headers)).status_code != 200:
                assert answer.json()["error"]["code"] == "no_ready_cell", "until the check that it waits for"
        left = 1000 - PROMPT - INITIAL_ESTIMATE
        assert left <= int(rate_limit(answer, "tokens")[1]) <= left + REFILL


async def test_requests_at_once_are_limited_until_one_has_ended_also_by_leaving(ingress: RunningIngress) -> None:
    key = fresh(max_concurrent=2)
    async with FakeCell(chunks=2).running() as cell:
        await route(ingress, cell, key)
        cell.release.clear()
        async with stream(ingress, key) as staying:
            async with stream(ingress, key) as leaving:
                assert [staying.status_code, leaving.status_code] == [200, 200]
                third = await ingress.post(BODY, **key.headers)
                assert (third.status_code, third.json()["error"]["type"]) == (429, "concurrency")
                assert third.headers["retry-after"] == "1"
            async with asyncio.timeout(DEADLINE_S):
                while await again(ingress, key) == 429:  # noqa: ASYNC110 - only asking tells
                    await asyncio.sleep(0.02)
            cell.release.set()
            await staying.aread()


async def again(ingress: RunningIngress, key: Keyed) -> int:
    """The status of a request that opens a stream and disconnects."""
    async with stream(ingress, key) as answer:
        return answer.status_code


def stream(ingress: RunningIngress, key: Keyed) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
    return ingress.http.stream("POST", "/v1/chat/completions", content=STREAM, headers=key.headers)


FORGED = {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "input_tokens": 1, "output_tokens": 1}}


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ({"usage": {"prompt_tokens": 300, "completion_tokens": 90, "prompt_tokens_details": {"cached": 5}}}, 390),
        (
            {"response": {**FORGED["usage"], "tools": [FORGED], "usage": {"input_tokens": 300, "output_tokens": 90}}},
            390,
        ),
        ({"message": {"usage": {"input_tokens": 300, "output_tokens": 1}}}, 301),
        ({"usage": {"input_tokens": 200, "cache_read_input_tokens": 100, "output_tokens": 90}}, 390),
        (
            {"choices": [{"text": '"usage": {"prompt_tokens": 300}', **FORGED}], "metadata": FORGED},
            math.ceil(len(STREAM) / 4) + 3,
        ),
    ],
)
async def test_streams_of_every_form_settle_by_their_own_usage(
    ingress: RunningIngress, said: dict[str, object], used: int
) -> None:
    key = fresh(tokens_per_min=1000)
    async with FakeCell().running() as cell:
        cell.last_event = said
        await route(ingress, cell, key)
        assert (await ingress.post(STREAM, **key.headers)).status_code == 200
        left = int(rate_limit(await ingress.post(b'{"model":"demo","max_tokens":1}', **key.headers), "tokens")[1])
        expected = 1000 - used - math.ceil(len(b'{"model":"demo","max_tokens":1}') / 4) - 1
        assert expected <= left <= expected + REFILL


async def test_what_a_cell_says_of_a_whole_answer_counts_and_of_a_stream_that_is_cut_its_prompt(
    ingress: RunningIngress,
) -> None:
    whole, cut = fresh(tokens_per_min=1000), fresh(tokens_per_min=1000)
    small = b'{"model":"demo","max_tokens":1}'
    async with FakeCell(chunks=2).running() as cell:
        cell.usage = {"prompt_tokens": 1, "completion_tokens": 1}
        cell.headers = "X-Switchyard-Prompt-Tokens: 300\r\nX-Switchyard-Completion-Tokens: 90\r\n"
        await route(ingress, cell, whole, cut)
        await ingress.post(BODY, **whole.headers)
        cell.headers = "X-Switchyard-Prompt-Tokens: 300\r\n"
        cell.release.clear()
        assert await again(ingress, cut) == 200
        cell.release.set()
        cell.headers = ""
        left = [int(rate_limit(await ingress.post(small, **key.headers), "tokens")[1]) for key in (whole, cut)]
        rest = 1000 - math.ceil(len(small) / 4) - 1
        assert rest - 390 <= left[0] <= rest - 390 + REFILL
        assert rest - 302 <= left[1] <= rest - 300 + REFILL


async def test_a_client_that_leaves_is_no_error_of_its_key_and_an_answer_of_5xx_is_one(ingress: RunningIngress) -> None:
    leaving, failing = fresh(), fresh()
    async with FakeCell(chunks=2).running() as cell:
        await route(ingress, cell, leaving, failing)
        cell.release.clear()
        assert await again(ingress, leaving) == 200
        cell.fails = True
        assert (await ingress.post(BODY, **failing.headers)).status_code == 500
        async with asyncio.timeout(DEADLINE_S):
            while "conn_cur=1" in (table := await ingress.haproxy.admin.send(KEY_COUNTS_COMMAND)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        counts = read_key_counts(table)
        assert [counts[key.entry.prefix] for key in (leaving, failing)] == [(1, 0, 0), (1, 0, 1)]


async def test_cells_are_sent_the_limits_of_their_deployment_and_never_a_clients(ingress: RunningIngress) -> None:
    async with FakeCell().running() as own, FakeCell().running() as usual:
        limited = msgspec.structs.replace(
            pool(own, name="limited", models=("limited",)), request_limits="sequences=256;stops=8"
        )
        await ingress.route(limited, pool(usual))
        await ingress.sees(**{own.name: "up", usual.name: "up"})
        for model in ("limited", "demo"):
            body = b'{"model": "%b", "messages": []}' % model.encode()
            answer = await ingress.post(body, **{"x-switchyard-limits": "sequences=1024"})
            assert answer.status_code == 200
        assert own.requests[-1].headers["x-switchyard-limits"] == "sequences=256;stops=8"
        assert "x-switchyard-limits" not in usual.requests[-1].headers
