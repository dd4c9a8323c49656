"""Requests become KServe's with llama.cpp's options; members that the model does not serve are refused by name."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine_agent.engines.triton.kserve import KServe, KServeError, TritonGone
from engine_agent.engines.triton.openai_api import read_chat, read_completion
from engine_agent.protocol.request_bodies import BadRequest
from tests.ports import free_ports

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say why"}]}
COMPLETION = {"model": "tiny", "prompt": "Say why"}


def sampling(inputs: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inputs["sampling_parameters"])
    return found


def test_a_completion_has_openais_default_limit_and_a_chat_none() -> None:
    completion = read_completion(json.dumps(COMPLETION).encode()).inputs
    assert (completion["text_input"], sampling(completion)) == ("Say why", {"max_tokens": 16})
    chat = read_chat(json.dumps(CHAT).encode()).inputs
    assert (json.loads(chat["messages"]), sampling(chat)) == ([{"role": "user", "content": "Say why"}], {})


def test_options_get_llama_cpps_names() -> None:
    given = {"temperature": 0, "top_k": 5, "repetition_penalty": 1.1, "seed": -1, "stop": ["."], "max_tokens": 3}
    inputs = read_completion(json.dumps({**COMPLETION, **given}).encode()).inputs
    assert sampling(inputs) == {
        "temperature": 0,
        "top_k": 5,
        "repeat_penalty": 1.1,
        "seed": 2**32 - 1,
        "stop": ["."],
        "max_tokens": 3,
    }


def test_parts_of_a_message_are_one_text_and_nothing_else_of_it_is_passed_on() -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "why"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts, "name": "x"}], "max_completion_tokens": 2}
    inputs = read_chat(json.dumps(body).encode()).inputs
    assert json.loads(inputs["messages"]) == [{"role": "user", "content": "Say why"}]
    assert sampling(inputs) == {"max_tokens": 2}


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"structured_outputs": {"regex": "a"}},
        {"stop_token_ids": [1]},
        {"min_tokens": 1, "max_tokens": 2},
        {"echo": True},
    ],
)
def test_members_that_the_model_does_not_serve_are_named(members: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as raised:
        read_chat(json.dumps({**CHAT, **members}).encode())
    assert (raised.value.param in members, raised.value.code) == (True, "unsupported_parameter")


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "integer"}}}, {"type": "integer"}),
    ],
)
def test_a_schema_reaches_llama_cpp(form: dict[str, Any], schema: Any) -> None:
    inputs = read_chat(json.dumps({**CHAT, "response_format": form}).encode()).inputs
    assert sampling(inputs).get("json_schema") == schema
    completion = json.dumps({**COMPLETION, "response_format": form}).encode()
    if schema is None:
        assert "json_schema" not in sampling(read_completion(completion).inputs)
    else:
        with pytest.raises(BadRequest, match="available for chats of this model only"):
            read_completion(completion)


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "c"}}, {"type": "structural_tag"}]
)
def test_a_form_without_a_schema_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="or json_schema with a schema"):
        read_chat(json.dumps({**CHAT, "response_format": form}).encode())


@pytest.mark.parametrize("prompt", [["x", "y"], [1, 2], [[1]]])
def test_a_prompt_is_one_text(prompt: Any) -> None:
    with pytest.raises(BadRequest, match="must be one text"):
        read_completion(json.dumps({**COMPLETION, "prompt": prompt}).encode())
    assert read_completion(json.dumps({**COMPLETION, "prompt": ["x"]}).encode()).inputs["text_input"] == "x"


def test_members_without_effect_are_taken() -> None:
    harmless = {"response_format": {"type": "text"}, "tool_choice": "none", "logprobs": False, "n": 1, "echo": False}
    assert read_chat(json.dumps({**CHAT, **harmless}).encode()).inputs["messages"]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"text_output":" Paris"}\n\n'


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


@pytest.mark.parametrize(
    ("sent", "raised", "said"),
    [
        (HEAD + chunk(TOKEN[:7]) + chunk(TOKEN[7:]) + b"0\r\n\r\n", None, ""),
        (HEAD + chunk(TOKEN), TritonGone, "broke|closed"),
        (HEAD + chunk(TOKEN) + b"zzz\r\n", TritonGone, "broke"),
        (b"", TritonGone, "broke|closed"),
        (
            HEAD + chunk(TOKEN) + chunk(b'data: {"error":"{\\"code\\":400,\\"message\\":\\"too long\\"}"}\n\n'),
            *(KServeError, "^too long$"),
        ),
        (
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 60\r\n\r\n"
            b'data: {"error":"{\\"code\\": 400, \\"message\\": \\"too long\\"}"}\n\n',
            *(KServeError, "^too long$"),
        ),
        (b'HTTP/1.1 400 Bad Request\r\nContent-Length: 14\r\n\r\n{"error":"no"}', KServeError, "^no$"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops", KServeError, "^Oops$"),
    ],
)
def test_an_answer_of_triton_is_whole_or_an_error(sent: bytes, raised: type[Exception] | None, said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v2/models/llm/generate_stream HTTP/1.1\r\n")
        writer.write(sent)
        writer.close()

    async def found() -> list[dict[str, Any]]:
        port = free_ports(1)
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            return [each async for each in KServe(port, 0).generate({"text_input": "x"})]

    if raised is None:
        assert asyncio.run(found()) == [{"text_output": " Paris"}]
    else:
        with pytest.raises(raised, match=said):
            asyncio.run(found())


def test_where_nobody_listens_the_model_is_not_ready() -> None:
    port = free_ports(1)
    assert not asyncio.run(KServe(port, port).is_ready())
