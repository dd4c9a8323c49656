"""The simulator continues streams: a repeat with the tokens that a client has gives the same events, in every dialect,
wherever the stream was cut."""

import asyncio
import json
import re
from typing import Any

import pytest

from engine_agent.protocol.continuation import CONTINUATION_HEADER
from tests.engine_agent.engines.sim.in_process import MODEL, application

TOOL = {"name": "look_up", "description": "finds", "parameters": {"type": "object", "properties": {}}}
CHAT = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "stop": ("/v1/chat/completions", {**CHAT, "stop": ["e"]}),
    "json": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "tool": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 40, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "completion": ("/v1/completions", {"prompt": "hello there", "max_tokens": 12}),
    "ids": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 12}),
    "response": ("/v1/responses", {"input": "hello there", "max_output_tokens": 12}),
    "message": ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 12}),
}
ON = ((CONTINUATION_HEADER, b"on"), (b"x-request-id", b"r1"))
MARK = re.compile(rb"^: (prompt|tokens) (.*)\n", re.MULTILINE)


def body_of(given: dict[str, Any], continuation: Any = None) -> bytes:
    more = {} if continuation is None else {"switchyard_continuation": continuation}
    return json.dumps({"model": MODEL, "stream": True, **given, **more}).encode()


def without_times(answer: bytes) -> bytes:
    return re.sub(rb'"created(_at)?":\d+', b"", answer)


def marks_of(answer: bytes) -> tuple[str, list[list[int]]]:
    found = MARK.findall(answer)
    groups = [[int(one) for one in text.split(b",")] for kind, text in found if kind == b"tokens"]
    return found[0][1].decode().replace(" ", ":"), groups


async def streams_of(name: str) -> None:
    path, given = BODIES[name]
    async with application() as running:
        status, whole = await running.send(path, body_of(given), sent=ON)
        assert status == 200
        _, plain = await running.send(path, body_of(given))
        prompt, groups = marks_of(whole)
        assert len(MARK.sub(b"", whole)) == len(plain), "marks are the only difference"
        assert b"\n: " not in plain
        for cut in (0, 1, len(groups) // 2, len(groups)):
            continuation = {"prompt": prompt, "groups": groups[:cut]}
            status, again = await running.send(path, body_of(given, continuation), sent=ON)
            assert status == 200
            assert without_times(again) == without_times(whole), cut


@pytest.mark.parametrize("name", BODIES)
def test_a_repeat_gives_the_same_events_and_usage(name: str) -> None:
    asyncio.run(streams_of(name))


@pytest.mark.parametrize("name", ["chat", "response", "message"])
def test_cached_tokens_are_those_of_the_first_run(name: str) -> None:
    async def ask() -> None:
        path, given = BODIES[name]
        words = " ".join(f"word{number}" for number in range(100))
        long = {"input": words} if "input" in given else {"messages": [{"role": "user", "content": words}]}
        body = {**given, **long, "temperature": 0}
        async with application() as running:
            (_, computed), (_, cached) = [await running.send(path, body_of(body), sent=ON) for _ in range(2)]
            assert len(marks_of(computed)[0].split(":")) == 2
            assert int(marks_of(cached)[0].split(":")[2]) > 0
            for whole in (computed, cached):
                prompt, groups = marks_of(whole)
                repeat = body_of(body, {"prompt": prompt, "groups": groups[:5]})
                _, again = await running.send(path, repeat, sent=ON)
                assert without_times(again) == without_times(whole)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("continuation", "sent", "status"),
    [
        ({"prompt": "9:0", "groups": []}, ON, 409),
        ({"prompt": "2:5c7da27da5d6b1b4", "groups": [[1]]}, ON, 409),
        ({"prompt": "2:5c7da27da5d6b1b4:99999999999", "groups": [[1]]}, ON, 409),
        ({"prompt": "", "groups": [[-1]]}, ON, 400),
        ({"prompt": "", "groups": [["1"]]}, ON, 400),
        ({"prompt": "", "groups": [], "more": 1}, ON, 400),
        ([], ON, 400),
        ({"prompt": "", "groups": []}, (), 400),
    ],
)
def test_other_repeats_are_refused(continuation: Any, sent: Any, status: int) -> None:
    async def ask() -> None:
        async with application() as running:
            got, answer = await running.send(
                "/v1/completions", body_of({"prompt": "hello there"}, continuation), sent=sent
            )
            assert got == status, answer

    asyncio.run(ask())


def test_an_answer_of_several_choices_has_no_marks() -> None:
    async def ask() -> None:
        async with application() as running:
            _, answer = await running.send("/v1/chat/completions", body_of({**CHAT, "n": 2}), sent=ON)
            assert not MARK.search(answer)

    asyncio.run(ask())
