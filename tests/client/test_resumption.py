"""Streams that break off are requested again, and continue where they stopped, or are reported as broken off."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from switchyard_client import ApiError, AsyncSwitchyard, BrokenOff, Event, Retries
from tests.client.regions import EAST, WEST, Regions, delta, events, refused, said

pytestmark = pytest.mark.asyncio
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
WHOLE = (ROLE, delta("one "), delta("two "), delta("three"), END, USAGE, "[DONE]")


def client(regions: Regions) -> AsyncSwitchyard:
    return AsyncSwitchyard(
        [EAST, WEST], transport=regions, retries=Retries(attempts=3, longest_wait_s=1.0, rest_s=60.0)
    )


async def read(regions: Regions, **options: Any) -> list[dict[str, Any]]:
    got: list[dict[str, Any]] = []

    async def note(stream: AsyncIterator[Event]) -> None:
        async for event in stream:
            got.append(event.json)  # noqa: PERF401 - also those before an error

    async with client(regions).stream("/chat/completions", {}, **options) as stream:
        try:
            await note(stream)
        except (BrokenOff, ApiError) as error:
            got.append({"error": type(error).__name__})
    return got


BROKEN = {"error": "BrokenOff"}


@pytest.mark.parametrize("cut", range(len(WHOLE)))
async def test_the_application_gets_each_event_once_wherever_the_stream_broke(cut: int) -> None:
    regions = Regions(east=[events(*WHOLE[:cut], breaks=True)], west=[events(*WHOLE)])
    assert await read(regions, resumes=True) == list(WHOLE[:-1])
    assert regions.hosts == ["east", "west"]
    assert regions.seen[0].headers["x-request-id"] == regions.seen[1].headers["x-request-id"]


@pytest.mark.parametrize(
    "repeat", [(ROLE, delta("one two th"), delta("ree"), END), (ROLE, *map(delta, "one two three"), END)]
)
async def test_a_repeat_may_divide_the_text_differently(repeat: Any) -> None:
    regions = Regions(east=[events(*WHOLE[:3], breaks=True)], west=[events(*repeat, "[DONE]")])
    got = await read(regions, resumes=True)
    texts = [choice["delta"].get("content", "") for event in got for choice in event["choices"]]
    assert "".join(texts) == "one two three"
    assert texts[:3] == ["", "one ", "two "]
    assert got[-1] == END


async def test_a_repeat_that_breaks_off_as_well_is_repeated_within_the_attempts() -> None:
    def begun(count: int) -> httpx.Response:
        return events(*WHOLE[:count], breaks=True)

    assert await read(Regions(east=[begun(4), events(*WHOLE)], west=[begun(2)]), resumes=True) == list(WHOLE[:-1])
    assert await read(Regions(east=[begun(4), begun(1)], west=[begun(2)]), resumes=True) == [*WHOLE[:4], BROKEN]


@pytest.mark.parametrize(
    ("first", "repeat", "requests"),
    [
        (WHOLE[:3], (ROLE, delta("one 2 three"), END, "[DONE]"), 2),
        ((ROLE, {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}), WHOLE, 1),
        ((ROLE, {"choices": [{"index": 1, "delta": {"content": "b"}}]}), WHOLE, 1),
        (({"type": "content_block_start", "content_block": {"type": "tool_use"}},), WHOLE, 1),
    ],
    ids=["another text", "tool call", "several choices", "tool use"],
)
async def test_what_cannot_be_continued_truthfully_is_broken_off(first: Any, repeat: Any, requests: int) -> None:
    regions = Regions(east=[events(*first, breaks=True)], west=[events(*repeat)])
    assert await read(regions, resumes=True) == [*first, BROKEN]
    assert len(regions.seen) == requests


def _block(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}


def _part(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "delta": text}


@pytest.mark.parametrize(
    ("opening", "piece", "last"),
    [
        ({"type": "response.created"}, _part, {"type": "response.completed"}),
        ({"type": "message_start"}, _block, {"type": "message_stop"}),
    ],
)
async def test_other_dialects_are_cut_where_their_text_was(opening: Any, piece: Any, last: Any) -> None:
    regions = Regions(
        east=[events(opening, piece("ab"), breaks=True)], west=[events(opening, piece("abcd"), piece("e"), last)]
    )
    assert await read(regions, resumes=True) == [opening, piece("ab"), piece("cd"), piece("e"), last]


async def test_a_refusal_of_the_repeat_is_reported() -> None:
    regions = Regions(east=[events(*WHOLE[:3], breaks=True)], west=[refused(404, "model_not_found")])
    assert (await read(regions, resumes=True))[-1] == {"error": "ApiError"}


async def test_a_stream_is_not_sent_again_unless_asked() -> None:
    regions = Regions(east=[events(*WHOLE[:3], breaks=True)], west=[events(*WHOLE)])
    assert (await read(regions))[-1] == BROKEN
    assert regions.hosts == ["east"]


async def test_a_whole_answer_that_breaks_off_is_requested_again() -> None:
    regions = Regions(east=[events("{", breaks=True)], west=[said("whole")])
    assert (await client(regions).chat("m", "hi", resumes=True)).text == "whole"
    with pytest.raises(BrokenOff):
        await client(Regions(east=[events("{", breaks=True)], west=[said("whole")])).chat("m", "hi")
