"""POST /v1/chat/completions: parses requests and writes answers in vLLM's shape."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.engines.openai_http import DONE_EVENT, Usage, error_event, event
from engine_agent.engines.sim.api.common import content_logprob, request_of
from engine_agent.engines.sim.planning.answer_plan import Answer, Token
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt, Tool, ToolChoice
from engine_agent.protocol.request_bodies import BadRequest, ChatBody, NamedChoice, ToolField, check_chat, read_body

TOOL_ROLES = frozenset({"tool", "function"})
"""Roles of messages that are results of calls."""


_decoder = msgspec.json.Decoder(ChatBody, strict=False)


def parse_chat(body: bytes, modalities: Collection[str] = ()) -> GenerationRequest:
    chat = read_body(_decoder, body)
    check_chat(chat, modalities)
    limit_param = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    tools = tools_of(chat.tools)
    return request_of(
        chat,
        (_prompt(chat, tools),),
        limit,
        limit_param=limit_param,
        tools=tools,
        tool_choice=_tool_choice(chat, tools),
        top_logprobs=chat.top_logprobs or 0 if chat.logprobs else None,
    )


def _prompt(chat: ChatBody, tools: tuple[Tool, ...]) -> Prompt:
    texts = [message.text() for message in chat.messages]
    return Prompt((*tool_texts(tools), *texts), answered=texts[-1], follows_tool=chat.messages[-1].role in TOOL_ROLES)


def tools_of(given: list[ToolField] | None) -> tuple[Tool, ...]:
    fields = [tool.function for tool in given or ()]
    return tuple(Tool(field.name, field.description or "", field.parameters) for field in fields)


def tool_texts(tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """Returns what the model reads of its tools, before everything else."""
    return tuple(f"{tool.name} {tool.description} {msgspec.json.encode(tool.parameters).decode()}" for tool in tools)


def _tool_choice(chat: ChatBody, tools: tuple[Tool, ...]) -> ToolChoice:
    given = chat.tool_choice
    if chat.tools == []:
        raise BadRequest(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    if given is None:
        given = "auto" if tools else "none"
    return tool_choice(
        given.function.name if isinstance(given, NamedChoice) else "", given, tools, chat.parallel_tool_calls
    )


def tool_choice(name: str, kind: Any, tools: tuple[Tool, ...], parallel: bool | None) -> ToolChoice:
    """Returns a choice of tools: `name` selects a single one, else `kind` decides. Raises BadRequest if there is no
    such kind, or no such tool."""
    is_parallel = parallel is not False
    if kind == "none":
        return ToolChoice()
    if not tools:
        raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if name:
        if all(tool.name != name for tool in tools):
            raise BadRequest(
                "The tool specified in `tool_choice` does not match any of the specified `tools`", param="tool_choice"
            )
        return ToolChoice("named", name, is_parallel)
    if kind == "auto":
        return ToolChoice("auto", "", is_parallel)
    if kind == "required":
        return ToolChoice("required", "", is_parallel)
    raise BadRequest(
        f'Invalid value for `tool_choice`: {kind!r:.80}! Only named tools, "none", "auto" or "required" are supported.',
        param="tool_choice",
    )


@dataclass(frozen=True)
class ChatWriter:
    """See `AnswerWriter`. `key` is the unique part of all ids, `created` in Unix seconds."""

    key: str
    created: int
    request: GenerationRequest
    answers: Sequence[Answer]

    def opening(self, usage: Usage) -> bytes:
        roles = [
            self._chunk([_stream_choice(index, {"role": "assistant", "content": ""})])
            for index in range(len(self.answers))
        ]
        return b"".join(roles)

    def token_event(self, answer: int, index: int) -> bytes:
        planned = self.answers[answer]
        token = planned.tokens[index]
        is_last = index == len(planned.tokens) - 1
        delta = self._delta(answer, index, token)
        choice = _stream_choice(
            answer,
            delta,
            stop_reason=planned.stop_reason if is_last else None,
            logprobs=self._logprobs([(index, token)]),
            finish_reason=planned.finish_reason if is_last else None,
        )
        return self._chunk([choice])

    def closing(self, usage: Usage) -> bytes:
        counts = self._chunk([], usage=usage.body()) if self.request.include_usage else b""
        return counts + DONE_EVENT

    def whole(self, usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return msgspec.json.encode(self._body("chat.completion", choices, usage=usage.body()))

    def error_event(self, status: int, message: str) -> bytes:
        return error_event(status, message)

    def _delta(self, answer: int, index: int, token: Token) -> dict[str, Any]:
        if token.call is None:
            return {"content": token.delta}
        tokens = self.answers[answer].tokens
        if index and tokens[index - 1].call == token.call:
            return {"tool_calls": [{"index": token.call, "function": {"arguments": token.delta}}]}
        return {"tool_calls": [{"index": token.call, **self._call(answer, token.call, token.text, "")}]}

    def _call(self, answer: int, call: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{self.key}{answer:02x}{call:02x}", "type": "function", "function": function}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.called:
            message["tool_calls"] = [
                self._call(index, call, name, arguments) for call, (name, arguments) in enumerate(answer.called)
            ]
        return {
            "index": index,
            "message": message,
            "stop_reason": answer.stop_reason,
            "logprobs": self._logprobs(list(enumerate(answer.tokens))),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[tuple[int, Token]]) -> dict[str, Any] | None:
        top = self.request.top_logprobs
        if top is None:
            return None
        return {"content": [content_logprob(token.text, index, top) for index, token in tokens]}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._body("chat.completion.chunk", choices, **more))

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
            **more,
        }


def _stream_choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
