"""What the answers of all families share: usage, events, errors, log probabilities, and what a writer of answers is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine_agent.engines.sim.text.logprobs import Ranked, ranked_tokens
from engine_agent.protocol.api_surface import ErrorForm, error_object

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerWriter(Protocol):
    """Writes what one request gets, in the form of its family. A stream is `opening`, a `token_event` for each token of
    each answer, and `closing`; anything else is `whole`."""

    def opening(self, usage: Usage) -> bytes:
        """What comes before the first token."""

    def token_event(self, answer: int, index: int) -> bytes:
        """The `index`th token of an answer."""

    def closing(self, usage: Usage) -> bytes:
        """What comes after the last token of the last answer."""

    def whole(self, usage: Usage) -> bytes:
        """All of it as one body."""

    def error_event(self, status: int, message: str) -> bytes:
        """The last event of a stream that broke."""


def event(body: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error as OpenAI writes it."""
    return msgspec.json.encode(error_object(ErrorForm.OPENAI, status, message, code=code, param=param))


def error_event(status: int, message: str) -> bytes:
    """The last event of an OpenAI stream that broke; no `[DONE]` follows it."""
    return b"data: " + error_body(status, message) + b"\n\n"


def logprob_body(ranked: Sequence[Ranked], **more: Any) -> dict[str, Any]:
    """The likeliest of some tokens, as OpenAI writes it."""
    first = ranked[0]
    return {"token": first.text, "logprob": first.logprob, "bytes": list(first.text.encode()), **more}


def content_logprob(text: str, index: int, top: int) -> dict[str, Any]:
    """A token with the `top` likeliest at its place, as chats and responses write them."""
    ranked = ranked_tokens(text, index, max(0, top - 1))
    return logprob_body(ranked, top_logprobs=[logprob_body([one]) for one in ranked[:top]])


def models_body(cards: Iterable[dict[str, Any]]) -> bytes:
    """GET /v1/models."""
    return msgspec.json.encode({"object": "list", "data": list(cards)})


def model_card(name: str, created: int, max_model_len: int, base: str) -> dict[str, Any]:
    """GET /v1/models/{model}, of the model `base` itself or of an adapter of it: vLLM's, where an adapter's `root` is a
    path and it has no `max_model_len`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "switchyard",
        "root": name,
        "parent": None if name == base else base,
        "max_model_len": max_model_len,
    }
