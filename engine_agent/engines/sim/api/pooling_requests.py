"""Embeddings and rankings: what a request means. Texts are read, nothing is generated."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine_agent.engines.sim.api.completion_requests import parse_prompts
from engine_agent.engines.sim.planning.generation_request import Prompt
from engine_agent.engines.sim.text.vectors import DIMENSIONS
from engine_agent.protocol.request_bodies import BadRequest, Message, NotNegative, Positive, Seed, read_body

MOST_INPUTS = 2048
MOST_TOKENS = 300_000
"""OpenAI's limits for embeddings: inputs, and their tokens together."""


@dataclass(frozen=True)
class PoolingRequest:
    """Texts to be read. `pairs` are the places of two prompts each that are compared; each pair is read as one."""

    model: str
    prompts: tuple[Prompt, ...]
    priority: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    is_base64: bool = False
    dimensions: int = DIMENSIONS
    top_n: int = 0

    def reads(self) -> tuple[int, ...]:
        """How many tokens each thing that is read has."""
        if self.pairs:
            return tuple(self.prompts[one].tokens + self.prompts[other].tokens for one, other in self.pairs)
        return tuple(prompt.tokens for prompt in self.prompts)


class _Common(Struct, kw_only=True):
    model: str
    priority: Seed | None = None


class InputBody(_Common, kw_only=True):
    """POST /v1/embeddings: `input`, or a conversation."""

    input: Any = None
    messages: list[Message] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: str | None = None
    dimensions: Positive | None = None


class RerankBody(_Common, kw_only=True):
    """POST /rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: NotNegative | None = None


_input = msgspec.json.Decoder(InputBody)
_rerank = msgspec.json.Decoder(RerankBody)


def parse_input(body: bytes) -> PoolingRequest:
    """What a request with `input` asks for.

    Raises:
        BadRequest: not JSON, or a field is missing, wrong or not supported.
    """
    given = read_body(_input, body)
    if given.encoding_format in {"bytes", "bytes_only"}:
        raise BadRequest(f"encoding_format {given.encoding_format} is not supported by sim", param="encoding_format")
    if given.embed_dtype not in {None, "float32"}:
        raise BadRequest("embed_dtype: sim has float32 alone", param="embed_dtype")
    if given.dimensions is not None and given.dimensions > DIMENSIONS:
        raise BadRequest(f"dimensions must be at most {DIMENSIONS}, got {given.dimensions}", param="dimensions")
    if given.messages is not None:
        prompts: tuple[Prompt, ...] = (_conversation(given.messages),)
    else:
        prompts = _limited(parse_prompts(given.input, "input"), "input")
    return PoolingRequest(
        given.model,
        prompts,
        given.priority or 0,
        is_base64=given.encoding_format == "base64",
        dimensions=given.dimensions or DIMENSIONS,
    )


def _conversation(messages: list[Message]) -> Prompt:
    if not messages:
        raise BadRequest("messages: expected at least one", param="messages")
    return Prompt.of_text(" ".join(message.text() for message in messages))


def parse_rerank(body: bytes) -> PoolingRequest:
    """What a request for a ranking asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    given = read_body(_rerank, body)
    documents = _limited(_texts(given.documents, "documents"), "documents")
    pairs = tuple((0, index) for index in range(1, len(documents) + 1))
    prompts = (Prompt.of_text(given.query), *documents)
    return PoolingRequest(given.model, prompts, given.priority or 0, pairs, top_n=given.top_n or 0)


def _texts(given: Any, param: str) -> tuple[Prompt, ...]:
    listed = given if isinstance(given, list) else [given]
    given_texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    texts = [text for text in given_texts if isinstance(text, str)]
    if not listed or len(texts) != len(listed):
        raise BadRequest(f"{param}: expected a text or a list of texts", param=param)
    return tuple(map(Prompt.of_text, texts))


def _limited(prompts: tuple[Prompt, ...], param: str) -> tuple[Prompt, ...]:
    if len(prompts) > MOST_INPUTS:
        raise BadRequest(f"{param}: at most {MOST_INPUTS} inputs, got {len(prompts)}", param=param)
    if (tokens := sum(prompt.tokens for prompt in prompts)) > MOST_TOKENS:
        raise BadRequest(f"{param}: at most {MOST_TOKENS} tokens together, got {tokens}", param=param)
    return prompts
