"""Embeddings and rankings: how answers are written, in the shapes of OpenAI and vLLM."""

import base64
from array import array
from collections.abc import Callable

import msgspec

from engine_agent.engines.sim.api.pooling_requests import PoolingRequest
from engine_agent.engines.sim.text.vectors import embedding, similarity

PoolingWriter = Callable[[PoolingRequest, str, int], bytes]
"""Writes the answer to a request, with the unique part of its id and its time in Unix seconds."""


def _vector(request: PoolingRequest, text: str) -> list[float] | str:
    vector = embedding(text, request.dimensions)
    if not request.is_base64:
        return list(vector)
    return base64.b64encode(array("f", vector).tobytes()).decode()


def embeddings_body(request: PoolingRequest, key: str, created: int) -> bytes:
    """POST /v1/embeddings."""
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
    """POST /rerank: the best first, `top_n` of them."""
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
