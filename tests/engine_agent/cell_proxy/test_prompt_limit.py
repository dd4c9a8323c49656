"""A prompt that would kill its engine does not reach it: the engine counts it, or it is refused."""

import json
from typing import Any

import pytest

from engine_agent.cell_proxy.prompt_limit import Uncountable, count_requests
from tests.engine_agent.cell_proxy.engine import json_answer
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
LIMIT = 8
asynchronous = pytest.mark.asyncio


def words(message: Message) -> bytes:
    """An engine whose tokens are words."""
    asked = json.loads(message.body)
    text = asked.get("prompt") or " ".join(str(each["content"]) for each in asked["messages"])
    counted = {"count": len(text.split()), "tokens": []}
    if "count_tokens" in message.first_line:
        counted = {"input_tokens": counted["count"]}
    return json_answer(json.dumps(counted).encode())


def chat(*texts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text} for text in texts], **more}


async def ask(proxy: LocalProxy, path: str, body: Any) -> Message:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await proxy.send(request(path, raw))
    answer = await read_message(reader)
    writer.close()
    return answer


SHORT = [
    (CHAT, chat("one two three")),
    (COMPLETIONS, {"model": "tiny", "prompt": "one " * LIMIT}),
    (COMPLETIONS, {"model": "tiny", "prompt": [1] * LIMIT}),
    (COMPLETIONS, {"model": "tiny", "prompt": ["one two", "three"]}),
    (MESSAGES, chat("one two three")),
    ("/tokenize", {"model": "tiny", "prompt": "one " * 100}),
]
LONG = [
    (CHAT, chat("one " * 5, "two " * 5), 10),
    (COMPLETIONS, {"model": "tiny", "prompt": "one " * 9}, 9),
    (COMPLETIONS, {"model": "tiny", "prompt": [1] * 9}, 9),
    (COMPLETIONS, {"model": "tiny", "prompt": ["one", "two " * 9]}, 9),
    (COMPLETIONS, {"model": "tiny", "prompt": [[1], [2] * 9]}, 9),
    (MESSAGES, chat("one " * 9), 9),
]
UNCOUNTABLE = [
    ("/v1/responses", {"model": "tiny", "input": "one"}, "prompts of /v1/responses are not counted"),
    ("/v1/embeddings", {"model": "tiny", "input": "one"}, "prompts of /v1/embeddings are not counted"),
    (CHAT, chat([{"type": "image_url", "image_url": {"url": "data:"}}]), "a part of type image_url"),
    (CHAT, chat([{"text": "x"}]), "a part of type None"),
    (CHAT, chat("one", documents=[{"text": "one " * 99}]), "documents become text"),
    (MESSAGES, chat([{"type": "tool_result", "content": [{"type": "image"}]}]), "a part of type image"),
    (COMPLETIONS, {"model": "tiny", "prompt": None, "prompt_embeds": "x"}, "prompt_embeds has no tokens"),
    (COMPLETIONS, {"model": "tiny", "prompt": ["one"] * 65}, "it has 65 prompts, and 64 are the most that are counted"),
    (COMPLETIONS, {"model": "tiny"}, "a prompt is neither text nor tokens"),
]


@asynchronous
async def test_what_fits_reaches_the_engine() -> None:
    async with proxy_of(max_prompt_tokens=LIMIT) as proxy:
        proxy.engine.counts = words
        for path, body in SHORT:
            assert (await ask(proxy, path, body)).status == 200, path
        assert [message.first_line.split()[1] for message in proxy.engine.requests] == [path for path, _ in SHORT]


@asynchronous
async def test_what_is_longer_gets_400_and_never_reaches_it() -> None:
    async with proxy_of(max_prompt_tokens=LIMIT) as proxy:
        proxy.engine.counts = words
        for path, body, tokens in LONG:
            answer = await ask(proxy, path, body)
            said = answer.json()["error"]
            assert answer.status == 400, path
            assert said["message"] == f"the prompt has {tokens} tokens, and this model takes prompts of at most {LIMIT}"
        assert proxy.engine.requests == []
        assert not proxy.cell.in_flight


@asynchronous
async def test_what_cannot_be_counted_is_refused_with_the_reason() -> None:
    async with proxy_of(max_prompt_tokens=LIMIT) as proxy:
        proxy.engine.counts = words
        for path, body, why in UNCOUNTABLE:
            answer = await ask(proxy, path, body)
            assert answer.status == 400, path
            assert why in answer.json()["error"]["message"]
        assert proxy.engine.requests == []


@asynchronous
@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (json_answer(b'{"error": {"message": "no such role"}}', b"400 Bad Request"), 400, "status 400: no such role"),
        (json_answer(b"{}", b"404 Not Found"), 400, "the engine does not, with status 404"),
        (json_answer(b'{"count": null}'), 400, "the engine does not, with status 200"),
        (json_answer(b"count: 1"), 400, "the engine does not, with status 200"),
        (b"nonsense\r\n\r\n", 503, "it does not count tokens"),
    ],
)
async def test_an_engine_that_does_not_count_gets_nothing(answer: bytes, status: int, said: str) -> None:
    async with proxy_of(max_prompt_tokens=LIMIT) as proxy:
        proxy.engine.counts = lambda _: answer
        refused = await ask(proxy, CHAT, chat("one"))
        assert refused.status == status
        assert said in refused.json()["error"]["message"]
        assert proxy.engine.requests == []


@asynchronous
async def test_without_a_limit_nothing_is_counted() -> None:
    async with proxy_of() as proxy:
        assert (await ask(proxy, CHAT, chat("one " * 99))).status == 200
        assert (await ask(proxy, "/v1/responses", {"model": "tiny", "input": "one"})).status == 200


def test_a_chat_is_counted_with_all_that_its_prompt_is_made_of() -> None:
    body = chat("one", tools=[{"type": "function"}], chat_template_kwargs={"a": 1}, temperature=0.5, stream=True)
    ((path, asked),) = count_requests(CHAT.encode(), json.dumps({**body, "model": "public"}).encode(), "tiny")  # type: ignore[misc]
    assert path == b"/tokenize"
    assert asked == {name: body[name] for name in ("messages", "tools", "chat_template_kwargs")} | {"model": "tiny"}


@pytest.mark.parametrize("body", [b"[]", b"7", b""])
def test_what_is_no_request_is_not_counted(body: bytes) -> None:
    with pytest.raises(Uncountable):
        list(count_requests(COMPLETIONS.encode(), body, "tiny"))
