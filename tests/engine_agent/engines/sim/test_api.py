"""All families of paths, over the application: shapes, streams that say what whole answers say, and counts."""

import base64
import json
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.engine_agent.engines.sim.in_process import ADAPTER, MODEL, Application, application

pytestmark = pytest.mark.asyncio
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "the weather and the time in this city"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        {"tools": TOOLS, "max_tokens": 3},
        {"n": 3, "logprobs": True, "top_logprobs": 2},
        {"response_format": FORMAT},
        {"stop": ["a", "e"], "include_stop_str_in_output": True},
    ],
)
async def test_a_streamed_chat_says_what_a_whole_one_says(more: Any) -> None:
    async with application() as served:
        whole = await served.ask(CHAT, messages=USER, **more)
        events = await served.events(CHAT, messages=USER, stream_options=USAGE, **more)

    chat = ChatCompletion.model_validate(whole)
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    for choice, want in zip(chat.choices, whole["choices"], strict=True):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        raw = [part for event in events for part in event["choices"] if part["index"] == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        assert _calls(parts) == [
            (call["id"][-4:], call["function"]["name"], call["function"]["arguments"])
            for call in want["message"].get("tool_calls", [])
        ]
        assert (parts[-1].finish_reason, raw[-1]["stop_reason"]) == (choice.finish_reason, want["stop_reason"])
        assert [part["finish_reason"] for part in raw[:-1]] == [None] * (len(raw) - 1)
        if more.get("logprobs"):
            assert (
                _joined(part["logprobs"]["content"] for part in raw if part["logprobs"]) == want["logprobs"]["content"]
            )
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == whole["usage"][name]


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def _calls(parts: list[Any]) -> list[tuple[str, str, str]]:
    calls: dict[int, list[str]] = {}
    for part in parts:
        for call in part.delta.tool_calls or ():
            if call.index not in calls:
                calls[call.index] = [call.id[-4:], call.function.name, ""]
            calls[call.index][2] += call.function.arguments
    return [(one, name, arguments) for one, name, arguments in calls.values()]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "tell me a story"},
        {"prompt": ["one", "two words"], "n": 2, "logprobs": 2},
        {"prompt": [[1, 2], [3]], "logprobs": 0},
        {"prompt": "choose", "structured_outputs": {"choice": ["red", "green"]}},
    ],
)
async def test_a_streamed_completion_says_what_a_whole_one_says(more: Any) -> None:
    options = {"include_usage": True}
    async with application() as served:
        whole = await served.ask(COMPLETIONS, **{"max_tokens": 5, **more})
        events = await served.events(COMPLETIONS, **{"max_tokens": 5, **more}, stream_options=options)

    assert len(Completion.model_construct(**whole).choices) == len(whole["choices"])
    for want in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"]]
        own = [part for part in parts if part["index"] == want["index"]]
        assert "".join(part["text"] for part in own) == want["text"]
        assert own[-1]["finish_reason"] == want["finish_reason"]
        for name in want["logprobs"] or ():
            assert _joined(part["logprobs"][name] for part in own) == want["logprobs"][name]
        if want["logprobs"]:
            tokens, offsets = want["logprobs"]["tokens"], want["logprobs"]["text_offset"]
            assert all(want["text"].startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@pytest.mark.parametrize(
    "more",
    [
        {"input": "tell me a story"},
        {
            "input": USER,
            "instructions": "be kind",
            "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        },
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"input": "x", "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    ],
)
async def test_a_streamed_response_says_what_a_whole_one_says(more: Any) -> None:
    events_of = TypeAdapter(ResponseStreamEvent)
    async with application() as served:
        whole = Response.model_validate(await served.ask(RESPONSES, **more))
        events = [events_of.validate_python(event) for event in await served.events(RESPONSES, **more)]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [_said(item) for item in done] == [_said(item) for item in whole.output]
    assert [_said(item) for item in last.response.output] == [_said(item) for item in whole.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert whole.status == ("incomplete" if "max_output_tokens" in more else "completed")
    assert whole.usage is not None
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens


def _said(item: Any) -> tuple[Any, ...]:
    return (item.arguments, item.name) if item.type == "function_call" else (item.content[0].text, item.status)


@pytest.mark.parametrize(
    ("more", "stop"),
    [
        ({}, ("end_turn", None)),
        ({"tools": [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]}, ("tool_use", None)),
        ({"stop_sequences": ["a"]}, ("stop_sequence", "a")),
        ({"max_tokens": 2}, ("max_tokens", None)),
    ],
)
async def test_a_streamed_message_says_what_a_whole_one_says(more: Any, stop: tuple[str, str | None]) -> None:
    asked = {"messages": USER, "max_tokens": 500, "system": "be kind", **more}
    async with application() as served:
        whole = await served.ask(MESSAGES, **asked)
        events = await served.events(MESSAGES, **asked)
        counted = await served.ask(f"{MESSAGES}/count_tokens", **{**asked, "max_tokens": None})

    assert (whole["stop_reason"], whole["stop_sequence"]) == stop
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["partial"] += delta.get("text", delta.get("partial_json"))
    for block, want in zip(blocks, whole["content"], strict=True):
        partial = block["partial"]
        assert want == (
            {"type": "text", "text": partial} if want["type"] == "text" else {**want, "input": json.loads(partial)}
        )
    delta = events[-2]
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == stop
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    read = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert counted["input_tokens"] == read == delta["usage"]["input_tokens"] + delta["usage"]["cache_read_input_tokens"]


async def test_embeddings_are_vectors_in_both_encodings() -> None:
    async with application() as served:
        floats = await served.ask("/v1/embeddings", input=["a b", "c"], dimensions=8)
        packed = await served.ask("/v1/embeddings", input=["a b", "c"], dimensions=8, encoding_format="base64")

    CreateEmbeddingResponse.model_validate(floats)
    for one, other in zip(floats["data"], packed["data"], strict=True):
        assert list(array("f", base64.b64decode(other["embedding"]))) == pytest.approx(one["embedding"])
    assert floats["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 3,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


async def test_a_ranking_has_the_nearest_document_first() -> None:
    async with application() as served:
        ranking = await served.ask("/v2/rerank", query="the sea", documents=["an oak", "the sea"], top_n=1)

    assert [(one["index"], one["document"]["text"]) for one in ranking["results"]] == [(1, "the sea")]
    assert ranking["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


async def test_texts_are_made_tokens_and_texts_again() -> None:
    async with application() as served:
        tokens = await served.ask("/tokenize", prompt="An unheard-of  word", return_token_strs=True)
        text = await served.ask("/detokenize", tokens=tokens["tokens"])
        chat = await served.ask("/tokenize", messages=USER)
        usage = (await served.ask(CHAT, messages=USER))["usage"]

    assert (tokens["count"], tokens["token_strs"]) == (3, ["An", " unheard-of", "  word"])
    assert text == {"prompt": "An unheard-of  word"}
    assert chat["count"] == usage["prompt_tokens"]


async def test_a_model_says_how_long_its_context_is_and_the_version_is_known() -> None:
    async with application() as served:
        _, models = await served.send("/v1/models", b"", "GET")
        _, model = await served.send(f"/v1/models/{MODEL}", b"", "GET")
        missing, _ = await served.send("/v1/models/other", b"", "GET")
        _, version = await served.send("/version", b"", "GET")

    assert json.loads(models)["data"][0] == json.loads(model)
    assert json.loads(model)["max_model_len"] == 8192
    assert missing == 404
    assert json.loads(version) == {"version": "sim"}


async def test_an_adapter_is_listed_under_its_model_and_answers_under_its_own_name() -> None:
    body = {"messages": [{"role": "user", "content": "why? " * 40}], "seed": 1}
    async with application() as served:
        _, models = await served.send("/v1/models", b"", "GET")
        _, card = await served.send(f"/v1/models/{ADAPTER}", b"", "GET")
        base, tuned = await served.ask(CHAT, **body), await served.ask(CHAT, model=ADAPTER, **body)
        again = await served.ask(CHAT, model=ADAPTER, **body)
        status, missing = await served.send(CHAT, json.dumps({"model": "acme/other", **body}).encode())

    assert [(each["id"], each["root"], each["parent"]) for each in json.loads(models)["data"]] == [
        (MODEL, MODEL, None),
        (ADAPTER, ADAPTER, MODEL),
    ]
    assert json.loads(card)["parent"] == MODEL
    assert (base["model"], tuned["model"]) == (MODEL, ADAPTER)
    texts = [answer["choices"][0]["message"]["content"] for answer in (base, tuned, again)]
    assert texts[0] != texts[1] == texts[2]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (base, tuned, again)]
    assert cached[:2] == [0, 0], "what the model left in the cache is of no use to its adapter"
    assert cached[2] > 0
    assert (status, json.loads(missing)["error"]["code"]) == (404, "model_not_found")


async def test_an_error_of_messages_is_anthropics() -> None:
    async with application() as served:
        status, body = await served.send(
            MESSAGES, b'{"model": "other", "max_tokens": 1, "messages": [%s]}' % b'{"role": "user", "content": "x"}'
        )

    assert status == 404
    want = {"type": "not_found_error", "message": "The model `other` does not exist."}
    error = {**want, "param": "model", "code": "model_not_found"}
    assert json.loads(body) == {"type": "error", "error": error}


async def _counted(served: Application) -> tuple[int, int]:
    prompts, generated = 0, 0
    for path, body in (
        (CHAT, {"messages": USER, "n": 3, "max_tokens": 4}),
        (COMPLETIONS, {"prompt": ["one two", "three"], "n": 2}),
        (CHAT, {"messages": USER, "tools": TOOLS}),
        ("/v1/embeddings", {"input": ["a b c", "d"]}),
        ("/rerank", {"query": "a b", "documents": ["c", "d"]}),
    ):
        usage = (await served.ask(path, **body))["usage"]
        prompts += usage["prompt_tokens"]
        generated += usage.get("completion_tokens", 0)
    response = (await served.ask(RESPONSES, input="tell me"))["usage"]
    message = (await served.ask(MESSAGES, messages=USER, max_tokens=9))["usage"]
    prompts += response["input_tokens"] + message["input_tokens"] + message["cache_read_input_tokens"]
    return prompts, generated + response["output_tokens"] + message["output_tokens"]


async def test_metrics_count_what_usage_says() -> None:
    async with application() as served:
        counted = await _counted(served)

        assert (served.meters.prompt_tokens, served.meters.generation_tokens) == counted


async def test_cached_tokens_are_those_of_the_prefix_cache() -> None:
    long = [{"role": "user", "content": "word " * 100}]
    async with application() as served:
        first = (await served.ask(CHAT, messages=long))["usage"]
        again = (await served.ask(CHAT, messages=long))["usage"]
        message = (await served.ask(MESSAGES, messages=long, max_tokens=5))["usage"]

    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"] == {"cached_tokens": 96}
    assert (message["input_tokens"], message["cache_read_input_tokens"]) == (4, 96)
