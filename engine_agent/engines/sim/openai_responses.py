"""What a client gets: OpenAI response bodies and stream events in vLLM's shape. Pure; ids and times are arguments."""

from dataclasses import dataclass
from typing import Any

import msgspec

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class ResponseShape:
    """Builds the bodies of one response. `created` is in Unix seconds, `chat` tells the two endpoints apart."""

    id: str
    created: int
    model: str
    chat: bool

    def opening_event(self) -> bytes:
        """The first event of a stream: who speaks. Completions have none."""
        return self._event([_choice(delta={"role": "assistant", "content": ""})]) if self.chat else b""

    def text_event(self, text: str, finish_reason: str | None) -> bytes:
        """The next piece of text."""
        content: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._event([_choice(**content, finish_reason=finish_reason, stop_reason=None)])

    def usage_event(self, usage: Usage) -> bytes:
        """The token counts, with no choice in it."""
        return self._event([], usage=usage.body())

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """The answer in one piece."""
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choices = [_choice(**content, finish_reason=finish_reason, stop_reason=None)]
        kind = "chat.completion" if self.chat else "text_completion"
        return msgspec.json.encode(self._body(kind, choices, usage=usage.body()))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + msgspec.json.encode(self._body(kind, choices, **more)) + b"\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


def _choice(finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error as OpenAI writes it; `code` falls back to the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
    return msgspec.json.encode(body)


def error_event(status: int, message: str) -> bytes:
    """The last event of a stream that broke; no `[DONE]` follows it."""
    return b"data: " + error_body(status, message) + b"\n\n"


def models_body(model: str, created: int, max_model_len: int) -> bytes:
    """GET /v1/models."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "switchyard",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }
    return msgspec.json.encode({"object": "list", "data": [card]})
