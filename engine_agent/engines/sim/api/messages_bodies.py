"""POST /v1/messages: how a message is written, whole or as events, and errors in Anthropic's form."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.engines.sim.api.writing import Usage, event
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest
from engine_agent.protocol.api_surface import ErrorForm, error_object


def anthropic_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as Anthropic writes it."""
    return error_object(ErrorForm.ANTHROPIC, status, message, code=code, param=param)


def count_body(tokens: int) -> bytes:
    """The answer of /v1/messages/count_tokens."""
    return msgspec.json.encode({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


@dataclass(frozen=True)
class MessagesWriter:
    """See `AnswerWriter`. `key` is the unique part of all ids."""

    key: str
    request: GenerationRequest
    answer: Answer

    def opening(self, usage: Usage) -> bytes:
        """The message before it has anything."""
        begun = self._message([], None, None, Usage(usage.prompt_tokens, 0, usage.cached_tokens))
        return _event("message_start", message=begun)

    def token_event(self, answer: int, index: int) -> bytes:
        """See `AnswerWriter`; what a block needs before its first token and after its last comes with them."""
        tokens = self.answer.tokens
        token = tokens[index]
        block = token.call or 0
        events = b""
        if index == 0 or tokens[index - 1].call != token.call:
            events += _event("content_block_start", index=block, content_block=self._block(token.call, is_empty=True))
        if token.delta:
            kind, name = ("text_delta", "text") if token.call is None else ("input_json_delta", "partial_json")
            events += _event("content_block_delta", index=block, delta={"type": kind, name: token.delta})
        if index == len(tokens) - 1 or tokens[index + 1].call != token.call:
            events += _event("content_block_stop", index=block)
        return events

    def closing(self, usage: Usage) -> bytes:
        """Why it ended, and the token counts."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage_body(usage)) + _event("message_stop")

    def whole(self, usage: Usage) -> bytes:
        calls: list[int | None] = list(range(len(self.answer.called)))
        blocks = [self._block(call) for call in calls or [None]]
        return msgspec.json.encode(self._message(blocks, *self._stop(), usage))

    def error_event(self, status: int, message: str) -> bytes:
        return event(anthropic_error(status, message), "error")

    def _stop(self) -> tuple[str, str | None]:
        if self.answer.finish_reason == "length":
            return "max_tokens", None
        if self.answer.calls:
            return "tool_use", None
        if isinstance(self.answer.stop_reason, str):
            return "stop_sequence", self.answer.stop_reason
        return "end_turn", None

    def _block(self, call: int | None, *, is_empty: bool = False) -> dict[str, Any]:
        if call is None:
            return {"type": "text", "text": "" if is_empty else self.answer.text}
        name, arguments = self.answer.called[call]
        written = {} if is_empty else _object(arguments)
        return {"type": "tool_use", "id": f"toolu_{self.key}{call:02x}", "name": name, "input": written}

    def _message(
        self, blocks: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.key}",
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self.request.model,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": _usage_body(usage),
        }


def _event(kind: str, **body: Any) -> bytes:
    return event({"type": kind, **body}, kind)


def _usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what came from a cache beside `input_tokens`, not among them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _object(arguments: str) -> Any:
    """Arguments as an object; nothing, where the limit cut them off."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
