"""Refuses prompts that are longer than the engine accepts, where such a prompt would kill it: Neuron's engines are
compiled for a maximum prompt that can be shorter than the context. The engine counts the tokens, on a path that it has
for that, on loopback. Prompts that cannot be counted are refused, never estimated."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from engine_agent.cell_proxy.api_paths import CELL_PATHS, CHAT_PATH, prompt_member_of
from engine_agent.cell_proxy.refusal import Refusal, prompt_not_counted, prompt_too_long
from engine_agent.cell_proxy.upstream import EnginePool, call
from engine_agent.protocol.api_surface import Counting

COMPLETIONS_PATH, MESSAGES_PATH = b"/v1/completions", b"/v1/messages"
COUNT_LIMIT_S = 10.0
"""For one count. A prompt of 1 MiB takes a tenth of that on its own core."""
_ANSWER_BYTES = 16 * 1024 * 1024
"""The answer contains the tokens: for the longest accepted body, one per byte, with ten digits each."""
_MOST_PROMPTS = 64
_CHAT_MEMBERS = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)
"""The members that make up a chat's prompt."""

CountRequest = tuple[bytes, dict[str, Any]]
"""Path of the engine and the body for it."""


class _Error(msgspec.Struct):
    message: str = ""


class _Counted(msgspec.Struct):
    """The answers of /tokenize and /v1/messages/count_tokens, and their errors."""

    count: int | None = None
    input_tokens: int | None = None
    error: _Error = msgspec.field(default_factory=_Error)


class Uncountable(ValueError):
    """A prompt whose tokens cannot be counted before the engine has it; the text says why."""


async def why_prompt_is_refused(pool: EnginePool, limit: int, model: str, path: bytes, body: bytes) -> Refusal | None:
    """Returns why a request may not go to an engine that accepts `limit` tokens of prompt, or None. `model` is the
    engine's name. Raises OSError if the engine cannot be reached, or does not count in time."""
    row = CELL_PATHS.get(path)
    if row is None or row.counting is Counting.NOTHING:
        return None
    try:
        for question in count_requests(path, body, model):
            tokens = question if isinstance(question, int) else await _count(pool, question)
            if tokens > limit:
                return prompt_too_long(tokens, limit, prompt_member_of(path))
    except Uncountable as error:
        return prompt_not_counted(str(error), limit)
    return None


def count_requests(path: bytes, body: bytes, model: str) -> Iterator[int | CountRequest]:
    """For each prompt of a request: its number of tokens if given, else the request that counts them. Raises
    Uncountable if there is no way to tell."""
    request = msgspec.json.decode(body) if body else {}
    if not isinstance(request, dict):
        raise Uncountable("the body is no object")
    if path == COMPLETIONS_PATH:
        yield from _of_completion(request, model)
    elif path == CHAT_PATH:
        yield b"/tokenize", {"model": model, **_of_chat(request)}
    elif path == MESSAGES_PATH:
        _check_media(request.get("messages"))
        yield b"/v1/messages/count_tokens", {**request, "model": model}
    else:
        raise Uncountable(f"prompts of {path.decode()} are not counted; {CHAT_PATH.decode()} is one whose are")


def _of_completion(request: dict[str, Any], model: str) -> Iterator[int | CountRequest]:
    if request.get("prompt_embeds") is not None:
        raise Uncountable("prompt_embeds has no tokens")
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    prompts: list[Any] = prompt if several and isinstance(prompt, list) else [prompt]
    if len(prompts) > _MOST_PROMPTS:
        raise Uncountable(f"it has {len(prompts)} prompts, and {_MOST_PROMPTS} are the most that are counted")
    special = {name: request[name] for name in ("add_special_tokens",) if request.get(name) is not None}
    for each in prompts:
        if isinstance(each, str):
            yield b"/tokenize", {"model": model, "prompt": each, **special}
        elif isinstance(each, list):
            yield len(each)
        else:
            raise Uncountable("a prompt is neither text nor tokens")


def _of_chat(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("documents") is not None:
        raise Uncountable("documents become text of the prompt that is not counted")
    _check_media(request.get("messages"))
    return {name: request[name] for name in _CHAT_MEMBERS if request.get(name) is not None}


def _check_media(messages: Any) -> None:
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in {"text", "refusal", "thinking", "redacted_thinking", "tool_use", "tool_result"}:
                raise Uncountable(f"a part of type {str(kind)[:40]} has tokens that are not counted")
            if kind == "tool_result":
                _check_media([part])


async def _count(pool: EnginePool, question: CountRequest) -> int:
    path, asked = question
    answer = await call(pool, b"POST", path, msgspec.json.encode(asked), COUNT_LIMIT_S, max_bytes=_ANSWER_BYTES)
    try:
        reported = msgspec.json.decode(answer.body, type=_Counted)
    except msgspec.DecodeError:
        reported = _Counted()
    tokens = reported.count if reported.count is not None else reported.input_tokens
    if answer.status != HTTPStatus.OK or tokens is None:
        reason = f": {reported.error.message[:200]}" if reported.error.message else ""
        raise Uncountable(f"the engine does not, with status {answer.status}{reason}")
    return tokens
