"""The client against regions that answer, refuse, break off and fall silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine_agent.protocol.api_surface import CELL_PATHS
from switchyard_client import (
    ApiError,
    AsyncSwitchyard,
    BrokenOff,
    Budget,
    DeadlineExceeded,
    NoAnswer,
    Retries,
    Usage,
)
from tests.client.regions import EAST, WEST, Regions, delta, events, never, refused, said

pytestmark = pytest.mark.asyncio
GONE = httpx.ConnectError("connection refused")
CUT = httpx.RemoteProtocolError("server disconnected without sending a response")
MORE: dict[str, Any] = {"retries": Retries(attempts=4, longest_wait_s=1.0, rest_s=60.0)}


def client(regions: Regions, **options: Any) -> AsyncSwitchyard:
    return AsyncSwitchyard([EAST, WEST], transport=regions, **{**MORE, **options})


async def test_an_answer_says_what_it_is_and_who_gave_it() -> None:
    limits = {
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5990",
        "x-ratelimit-reset-tokens": "1m0.5s",
    }
    regions = Regions(east=[said("hello", x_switchyard_region="us-east-1", **limits)])
    answer = await client(regions, api_key="sw_1").chat("m", "hi", max_tokens=5)
    assert (answer.text, answer.region, answer.attempts) == ("hello", "us-east-1", 1)
    assert answer.usage == Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    assert answer.budgets == {"tokens": Budget(6000, 5990, 60.5)}
    sent = regions.seen[0]
    assert sent.headers["authorization"] == "Bearer sw_1"
    assert json.loads(sent.content) == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.mark.parametrize("path", CELL_PATHS)
async def test_every_path_of_the_api_is_reached_as_it_is_documented(path: str) -> None:
    regions = Regions(east=[said("hello")])
    asked = client(regions)
    await asked.post(path, {"model": "m"})
    await asked.post(path.removeprefix("/"), {"model": "m"})
    assert [request.url.path for request in regions.seen] == [path, path]


@pytest.mark.parametrize("path", [path for path in CELL_PATHS if path.startswith("/v1/")])
async def test_the_version_may_be_left_out_of_a_path(path: str) -> None:
    regions = Regions(east=[said("hello")])
    await client(regions).post(path.removeprefix("/v1"), {"model": "m"})
    assert regions.seen[0].url.path in {path, path.removeprefix("/v1")} & set(CELL_PATHS)


@pytest.mark.parametrize("failure", [GONE, CUT, refused(503, "no_ready_cell", retry_after="1")])
async def test_another_region_answers_for_one_that_gave_no_byte(failure: Any) -> None:
    regions = Regions(east=[failure], west=[said("from the west")])
    asked = client(regions)
    assert (await asked.chat("m", "hi")).text == "from the west"
    assert (await asked.chat("m", "again")).attempts == 1  # and is first, while that one rests
    assert regions.hosts == ["east", "west", "west"]
    assert regions.seen[0].headers["x-request-id"] == regions.seen[1].headers["x-request-id"]


async def test_a_refusal_without_a_time_to_come_back_is_final_and_says_why() -> None:
    regions = Regions(east=[refused(404, "model_not_found", x_request_id="r-1")])
    with pytest.raises(ApiError, match="404 model_not_found: model_not_found it is") as error:
        await client(regions).chat("m", "hi")
    assert (error.value.status, error.value.code, error.value.request_id) == (404, "model_not_found", "r-1")
    assert regions.hosts == ["east"]


async def test_an_error_that_is_no_json_is_told_as_it_is() -> None:
    with pytest.raises(ApiError, match="502 refused: <html>bad gateway"):
        await client(Regions(east=[httpx.Response(502, text="<html>bad gateway")])).chat("m", "hi")


async def test_a_limit_is_waited_for_in_its_region() -> None:
    regions = Regions(east=[refused(429, "rate_limit_exceeded", retry_after_ms="1"), said("now")])
    assert (await client(regions).chat("m", "hi")).text == "now"
    assert regions.hosts == ["east", "east"]


async def test_attempts_end_and_name_what_each_region_said() -> None:
    regions = Regions(east=[GONE], west=[CUT])
    with pytest.raises(NoAnswer, match=r"east\.test.*connection refused.*west\.test.*disconnected"):
        await client(regions).chat("m", "hi")
    assert regions.hosts[:2] == ["east", "west"]
    assert len(regions.hosts) == MORE["retries"].attempts


async def test_an_answer_that_breaks_off_is_not_sent_again() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'{"choices":'
        raise httpx.ReadError("the peer is gone")

    regions = Regions(east=[httpx.Response(200, content=half())], west=[said("no")])
    with pytest.raises(BrokenOff, match="the peer is gone"):
        await client(regions).chat("m", "hi")
    assert regions.hosts == ["east"]


async def test_a_deadline_travels_with_each_attempt_and_ends_the_call() -> None:
    regions = Regions(east=[CUT], west=[never])
    with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.3 s"):
        await client(regions).chat("m", "hi", deadline_s=0.3)
    first, second = (int(request.headers["x-switchyard-deadline-ms"]) for request in regions.seen)
    assert 1 <= second <= first <= 300


async def test_a_timeout_of_the_caller_is_not_ours() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client(Regions(east=[never])).chat("m", "hi", deadline_s=60)


async def test_a_stream_gives_its_events_to_the_end() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    regions = Regions(east=[events(delta("one "), delta("two"), usage, "[DONE]")])
    async with client(regions).stream_chat("m", "hi") as stream:
        seen = [event async for event in stream]
    assert "".join(event.text for event in seen) == "one two"
    assert seen[-1].usage == Usage(2, 2)
    assert json.loads(regions.seen[0].content)["stream"] is True


@pytest.mark.parametrize("answer", [events(delta("one "), breaks=True), events(delta("one "))], ids=["cut", "no end"])
async def test_a_stream_without_its_end_is_broken_and_not_sent_again(answer: httpx.Response) -> None:
    regions, texts = Regions(east=[answer], west=[said("no")]), list[str]()
    with pytest.raises(BrokenOff):
        await read(client(regions), texts)
    assert (texts, regions.hosts) == (["one "], ["east"])


async def read(asked: AsyncSwitchyard, texts: list[str]) -> None:
    async with asked.stream_chat("m", "hi") as stream:
        async for event in stream:
            texts += [event.text]  # one by one: what came before an error stays


async def test_an_error_inside_of_a_stream_is_raised() -> None:
    error = {"error": {"message": "the engine died", "type": "server_error", "code": "engine_died"}}
    texts = list[str]()
    with pytest.raises(ApiError, match="engine_died: the engine died"):
        await read(client(Regions(east=[events(delta("one"), error)])), texts)
    assert texts == ["one"]


@pytest.mark.parametrize("last", ["response.completed", "message_stop"])
async def test_streams_of_responses_and_messages_end_by_their_own_events(last: str) -> None:
    regions = Regions(east=[events({"type": "response.output_text.delta", "delta": "hi"}, {"type": last})])
    async with client(regions).stream("/responses", {"model": "m", "input": "x"}) as stream:
        assert "".join([event.text async for event in stream]) == "hi"


async def test_hedging_is_off_and_then_asks_the_next_region_and_cancels_the_slow_one() -> None:
    regions = Regions(east=[never], west=[said("fast")])
    with pytest.raises(DeadlineExceeded):
        await client(regions).chat("m", "hi", deadline_s=0.05)
    assert regions.hosts == ["east"]
    answer = await client(regions, hedge_after_s=0.01).chat("m", "hi")
    assert (answer.text, answer.attempts) == ("fast", 2)
    assert regions.cancelled == ["east", "east"]


async def test_a_hedge_that_fails_waits_for_the_first() -> None:
    async def late(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return said("late, and good")

    regions = Regions(east=[late], west=[refused(500, "ingress_error")])
    assert (await client(regions, hedge_after_s=0.01).chat("m", "hi")).text == "late, and good"


async def test_work_that_can_wait_is_handed_in_once_and_waited_for() -> None:
    accepted = {"id": "ar_1", "status": "queued", "callback_secret": "shh"}
    done = {"id": "ar_1", "status": "done", "response": {"status_code": 200, "body": json.loads(said("done").content)}}
    regions = Regions(east=[CUT], west=[httpx.Response(202, json=accepted), *(httpx.Response(200, json=done),) * 2])
    asked = client(regions)
    pending = await asked.submit("/chat/completions", {"model": "m"}, deadline_s=60, callback_url="https://app/done")
    assert (pending.id, pending.callback_secret, pending.has_ended, pending.answer) == ("ar_1", "shh", False, None)
    ended = await asked.wait(pending, poll_s=0.01)
    assert ended.answer is not None
    assert ended.answer.text == "done"
    first, second = regions.seen[:2]
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert (second.headers["x-switchyard-deadline-ms"], second.headers["x-switchyard-callback-url"]) == (
        "60000",
        "https://app/done",
    )
    assert [str(request.url) for request in regions.seen[1:]] == [
        f"{WEST}/async/chat/completions",
        f"{WEST}/async/ar_1",
    ]


async def test_trace_headers_are_made_for_each_attempt() -> None:
    made = iter(["00-1", "00-2"])
    regions = Regions(east=[GONE], west=[said("hi")])
    await client(regions, trace=lambda: {"traceparent": next(made)}).chat("m", "hi")
    assert [request.headers["traceparent"] for request in regions.seen] == ["00-1", "00-2"]


async def test_a_client_needs_a_region() -> None:
    with pytest.raises(ValueError, match="base URL of at least one region"):
        AsyncSwitchyard([])
