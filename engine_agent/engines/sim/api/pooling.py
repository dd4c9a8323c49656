"""Embeddings and rankings: parses requests and writes answers in the shapes of OpenAI and vLLM. Texts are read, nothing
is generated."""

import base64
import functools
import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine_agent.engines.sim.api.completions import parse_prompts
from engine_agent.engines.sim.planning.generation_request import Prompt
from engine_agent.protocol.request_bodies import BadRequest, Message, NotNegative, Positive, Seed, read_body

# Embeddings are unit vectors in which each word of a text adds to a few dimensions. Equal texts have equal vectors, and
# texts that share words have similar ones. Rankings use the same similarity.

DIMENSIONS = 384
_FEATURES = 8


@functools.lru_cache(maxsize=65_536)
def _features(word: str) -> tuple[tuple[int, float], ...]:
    digest = hashlib.blake2s(word.encode(errors="surrogatepass"), digest_size=3 * _FEATURES).digest()
    return tuple(
        (int.from_bytes(digest[at : at + 2]), 1.0 if digest[at + 2] & 1 else -1.0) for at in range(0, len(digest), 3)
    )


def embedding(text: str, dimensions: int = DIMENSIONS) -> tuple[float, ...]:
    """Returns the unit vector of a text. Case and punctuation do not count."""
    vector = [0.0] * dimensions
    for word in text.split() or [text]:
        for place, sign in _features(word.lower().strip(".,;:!?\"'()") or word):
            vector[place % dimensions] += sign
    length = math.sqrt(sum(value * value for value in vector))
    if length == 0.0:
        # The words cancel each other, which happens with very few dimensions.
        return (1.0, *[0.0] * (dimensions - 1))
    return tuple(value / length for value in vector)


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the similarity of two embeddings: 1 for the same words, 0 for texts that share none."""
    return min(1.0, max(0.0, math.fsum(a * b for a, b in zip(one, other, strict=True))))


MOST_INPUTS = 2048
MOST_TOKENS = 300_000
"""OpenAI's limits for embeddings: inputs, and their tokens together."""


@dataclass(frozen=True)
class PoolingRequest:
    """Texts to read. `pairs` are the indexes of two prompts each that are compared; each pair is read as one text."""

    model: str
    prompts: tuple[Prompt, ...]
    priority: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    is_base64: bool = False
    dimensions: int = DIMENSIONS
    top_n: int = 0

    def reads(self) -> tuple[int, ...]:
        """Returns the number of tokens of each text that is read."""
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
    query: str
    documents: list[str | dict[str, Any]]
    top_n: NotNegative | None = None


_input = msgspec.json.Decoder(InputBody)
_rerank = msgspec.json.Decoder(RerankBody)


def parse_input(body: bytes) -> PoolingRequest:
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


PoolingWriter = Callable[[PoolingRequest, str, int], bytes]
"""Writes the answer to a request, with the unique part of its id and its time in Unix seconds."""


def _vector(request: PoolingRequest, text: str) -> list[float] | str:
    vector = embedding(text, request.dimensions)
    if not request.is_base64:
        return list(vector)
    return base64.b64encode(array("f", vector).tobytes()).decode()


def embeddings_body(request: PoolingRequest, key: str, created: int) -> bytes:
    data = [
        {"index": index, "object": "embedding", "embedding": _vector(request, prompt.answered)}
        for index, prompt in enumerate(request.prompts)
    ]
    tokens = sum(request.reads())
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    body = {"id": f"embd-{key}", "object": "list", "created": created, "model": request.model}
    return msgspec.json.encode({**body, "data": data, "usage": usage})


def _scores(request: PoolingRequest) -> list[float]:
    vectors = [embedding(prompt.answered) for prompt in request.prompts]
    return [similarity(vectors[one], vectors[other]) for one, other in request.pairs]


def rerank_body(request: PoolingRequest, key: str, created: int) -> bytes:
    scores = _scores(request)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or len(scores)]
    results = [
        {
            "index": index,
            "document": {"text": request.prompts[request.pairs[index][1]].answered, "multi_modal": None},
            "relevance_score": scores[index],
        }
        for index in ranked
    ]
    tokens = sum(request.reads())
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"id": f"rerank-{key}", "model": request.model, "usage": usage, "results": results})
