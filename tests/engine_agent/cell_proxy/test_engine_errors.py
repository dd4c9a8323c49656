"""Errors of engines in the format of the client's API. `vllm_errors.jsonl`: answers of vLLM 0.32 to odd requests, one
of each kind, with path, status and body."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine_agent.cell_proxy.engine_errors import MAX_HELD_BYTES, EngineError, ErrorAnswer, error_in_form, read_error
from engine_agent.cell_proxy.wire import ResponseHead
from engine_agent.protocol.api_surface import ANTHROPIC_TYPES, OPENAI_TYPES

CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"
MESSAGES, EMBEDDINGS = b"/v1/messages", b"/v1/embeddings"
RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "vllm_errors.jsonl").read_text(encoding="utf-8").splitlines()
]
PYTHON = re.compile(
    r"\{'|\[\{|<class|Traceback|input_value=|\(parameter=|NoneType|Union\[|validation error|0x[0-9a-f]{6}"
)
FLAGS = re.compile(r"--[a-z]+-[a-z]+")


def shown(path: bytes, status: int, body: bytes) -> tuple[int, Any]:
    answer = ErrorAnswer(path)
    answer.add(body)
    head, text = answer.in_form(ResponseHead(status, b"X", [], len(body), chunked=False, is_stream=False))
    assert head.content_length == len(text)
    return head.status, json.loads(text)


@pytest.mark.parametrize(("path", "status", "body"), RECORDED)
def test_an_error_of_vllm_is_a_sentence_in_the_form_of_its_path(path: str, status: int, body: Any) -> None:
    _, stated = shown(path.encode(), status, json.dumps(body).encode())
    error = stated["error"]
    assert isinstance(error["code"], str | None)
    assert isinstance(error["param"], str | None)
    is_message = path.startswith("/v1/messages")
    assert error["type"] in (ANTHROPIC_TYPES.values() if is_message else OPENAI_TYPES)
    assert stated.get("type") == ("error" if is_message else None)
    assert not PYTHON.search(error["message"]), error["message"]
    assert not FLAGS.search(error["message"]), error["message"]


def test_most_of_them_name_the_member_that_is_wrong() -> None:
    read = [read_error(path.encode(), status, body) for path, status, body in RECORDED]
    assert sum(error.param is not None for error in read) > 0.8 * len(read)


def vllm(message: str, param: str | None = None, code: int = 400) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


LONG = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=2049)"
)


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input"), (MESSAGES, "messages")]
)
def test_a_prompt_that_is_too_long_has_the_code_by_which_clients_know_it(path: bytes, param: str) -> None:
    error = read_error(path, 400, vllm(LONG, "input_tokens"))
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert error.message.startswith("prompt is too long: " if path == MESSAGES else "This model's maximum context")
    assert error.message.endswith("Please reduce the length of the input prompt.")


def test_llama_cpps_words_for_it_are_known() -> None:
    stated = {"code": 400, "message": "the request exceeds the available context size, try increasing it"}
    error = read_error(CHAT, 400, {"error": {**stated, "type": "exceed_context_size_error"}})
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


def test_a_schema_that_cannot_be_enforced_is_told_by_its_keywords() -> None:
    error = read_error(CHAT, 400, vllm("The provided JSON schema contains features not supported by xgrammar."))
    assert (error.status, error.code, error.param) == (400, "invalid_value", None)
    assert "`multipleOf`" in error.message
    said = "Unable to generate parser for this template. Automatic parser generation failed: JSON schema error at #: "
    error = read_error(CHAT, 400, {"error": {"message": f"{said}unrecognized type x", "code": None, "param": None}})
    assert error.message.endswith("cannot be enforced, JSON schema error at #: unrecognized type x")
    assert (error.status, error.code, error.param) == (400, "invalid_value", "response_format")


@pytest.mark.parametrize(
    "message",
    [
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "The sum of prompt length (4000), query length (0) and max_tokens (200) should not exceed max_seq_len (4096)",
    ],
    ids=["sglang", "sglang with its answer", "tensorrt-llm"],
)
def test_words_of_sglang_and_tensorrt_llm_for_it_are_known(message: str) -> None:
    error = read_error(CHAT, 400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400})
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (
            "image input is not supported - hint: you may need to provide the mmproj",
            "unsupported_parameter",
            "messages",
        ),
        (
            "Failed to parse messages: [json.exception.out_of_range.403] key 'text' not found",
            "invalid_value",
            "messages",
        ),
        ("Failed to parse tools: Expected 'tools' to be an array, got {}; tools = {}", "invalid_value", "tools"),
        ("'messages' is required", "missing_required_parameter", "messages"),
        ("vector::_M_range_check: __n (which is 100000000) >= this->size() (which is 49152)", "invalid_value", None),
    ],
)
def test_bodies_that_llama_cpp_cannot_read_do_not_count_against_its_cell(
    message: str, code: str, param: str | None
) -> None:
    """Its answers, as recorded: status 500."""
    error = read_error(CHAT, 500, {"error": {"code": 500, "message": message, "type": "server_error"}})
    assert (error.status, error.code, error.param) == (400, code, param)
    assert "; tools = " not in error.message
    real = {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}
    assert read_error(CHAT, 500, real).status == 500


@pytest.mark.parametrize(
    ("path", "stated", "expected"),
    [
        (CHAT, vllm("n must be at least 1, got 0."), ("invalid_value", "n")),
        (CHAT, vllm("Requested sample logprobs of 50, which is ...", "logprobs"), ("invalid_value", "top_logprobs")),
        (COMPLETIONS, vllm("Requested sample logprobs of 50", "logprobs"), ("invalid_value", "logprobs")),
        (
            RESPONSES,
            vllm("max_tokens must be at least 1, got 0.", "max_tokens"),
            ("invalid_value", "max_output_tokens"),
        ),
        (MESSAGES, vllm("stop cannot contain an empty string."), ("invalid_value", "stop_sequences")),
        (MESSAGES, vllm("max_completion_tokens=9 cannot be", "max_completion_tokens"), ("invalid_value", "max_tokens")),
        (CHAT, vllm("smollm2 is not a multimodal model"), ("unsupported_parameter", "messages")),
        (CHAT, vllm("'NoneType' object is not iterable"), ("invalid_type", None)),
        (CHAT, vllm("Grammar error: Invalid type: nonsense"), (None, None)),
        (CHAT, {"error": {"message": "slow down", "code": "rate_limited", "type": "x"}}, ("rate_limited", None)),
        (
            CHAT,
            {"object": "error", "message": "temperature must be low", "code": 400},
            ("invalid_value", "temperature"),
        ),
    ],
)
def test_what_is_wrong_is_named_as_the_client_named_it(path: bytes, stated: Any, expected: Any) -> None:
    error = read_error(path, 400, stated)
    assert (error.code, error.param) == expected
    if error.param not in {None, "messages"}:
        assert error.param in error.message or "logprobs" in error.message


@pytest.mark.parametrize(
    ("status", "stated"),
    [
        (404, {"detail": "Not Found"}),
        (404, vllm("Not Found", code=404)),
        (501, vllm("The model does not support Embeddings API", code=501)),
        (501, {"error": {"message": "This server does not support embeddings. Start it with `--embeddings`"}}),
    ],
)
def test_a_model_without_embeddings_makes_none(status: int, stated: Any) -> None:
    told, body = shown(EMBEDDINGS, status, json.dumps(stated).encode())
    assert (told, body["error"]["code"], body["error"]["param"]) == (404, "unsupported_model", "model")
    assert "makes no embeddings" in body["error"]["message"]


def test_a_model_that_does_not_exist_is_no_missing_path() -> None:
    error = read_error(EMBEDDINGS, 404, vllm("The model `x` does not exist. Valid aliases: smollm2.", "model", 404))
    assert error == EngineError(404, "The model `x` does not exist", "model_not_found", "model", "BadRequestError")


def test_thinking_is_refused_in_the_clients_terms() -> None:
    message = "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-config"
    error = read_error(MESSAGES, 400, vllm(message))
    assert (error.code, error.param) == ("unsupported_parameter", "thinking")
    assert "disabled" in error.message
    assert not FLAGS.search(error.message)


OPENAI = b'{"error":{"message":"m","type":"BadRequestError","param":"n","code":400}}'


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, b"Internal Server Error", "Internal Server Error"),
        (CHAT, b"", "the engine answered 500 Internal Server Error"),
        (CHAT, b"[]", "the engine answered 500 Internal Server Error"),
        (CHAT, b'{"object":"error","message":"old form"}', "old form"),
        (CHAT, b'{"error":"text"}', "text"),
        (CHAT, b'{"detail":[{"loc":["body","n"],"msg":"Field required"}]}', "n: Field required"),
        (CHAT, b"\xff\xfe", "\ufffd\ufffd"),
        (CHAT, b"[" * 2000, "[" * 2000),
        (CHAT, b'{"detail":"' + b"x" * MAX_HELD_BYTES, "the engine answered 500 Internal Server Error"),
        (CHAT, OPENAI, "m"),
        (MESSAGES, OPENAI, "m"),
        (MESSAGES, b'{"type":"error","error":{"type":"BadRequestError","message":"m"}}', "m"),
    ],
)
def test_every_form_keeps_its_message(path: bytes, body: bytes, message: str) -> None:
    status, stated = shown(path, 500, body)
    assert (status, stated["error"]["message"]) == (500, message)
    assert stated["error"]["type"] == ("api_error" if path == MESSAGES else "server_error")
    assert stated["error"]["code"] == "engine_internal_server_error"


def test_what_has_openais_form_keeps_it() -> None:
    error = EngineError(429, "m", "insufficient_quota", None, "insufficient_quota")
    assert json.loads(error_in_form(CHAT, error))["error"]["type"] == "insufficient_quota"
