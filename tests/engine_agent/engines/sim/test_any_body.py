"""Every body gets one of the answers that clients know."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_agent.engines.sim.in_process import MODEL, application
from tests.engine_agent.engines.sim.test_api import CHAT, COMPLETIONS, FORMAT, MESSAGES, RESPONSES, TOOLS, USER

pytestmark = pytest.mark.asyncio

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(allow_nan=False), st.text("ab ", max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "name", "text", "role"]), inner, max_size=3),
    ),
    max_leaves=6,
)
FIELDS = [
    *(
        "messages",
        "prompt",
        "input",
        "query",
        "documents",
        "tokens",
        "tools",
        "tool_choice",
        "stop",
    ),
    *(
        "response_format",
        "structured_outputs",
        "stop_token_ids",
        "n",
        "best_of",
        "max_tokens",
        "min_tokens",
        "logprobs",
    ),
    *("top_logprobs", "stream", "stream_options", "text", "instructions", "system", "seed"),
    *(
        "dimensions",
        "encoding_format",
        "suffix",
        "stop_sequences",
        "max_output_tokens",
        "include",
        "metadata",
        "thinking",
    ),
    *("previous_response_id", "reasoning", "output_config"),
]
RIGHT: dict[str, Any] = {
    "messages": USER,
    "prompt": "a b",
    "input": "a b",
    "query": "a",
    "documents": ["b"],
    "tokens": [1],
    "tools": TOOLS,
    "response_format": FORMAT,
    "max_tokens": 5,
    "stream": True,
    "logprobs": 1,
    "n": 2,
}
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/v1/embeddings",
         "/rerank", "/tokenize", "/detokenize")  # fmt: skip


@pytest.mark.slow
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    st.sets(st.sampled_from(sorted(RIGHT)), max_size=len(RIGHT)),
)
async def test_no_body_breaks_the_server(path: str, odd: dict[str, Any], right: set[str]) -> None:
    body = {"model": MODEL, **{name: RIGHT[name] for name in right}, **odd}
    async with application() as served:
        async with asyncio.timeout(60):
            status, answer = await served.send(path, json.dumps(body).encode())

    assert status in {200, 400, 404}
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@given(st.binary(max_size=40))
async def test_what_is_no_json_is_refused(body: bytes) -> None:
    async with application() as served:
        statuses = [(await served.send(path, body))[0] for path in PATHS]

    assert statuses == [400] * len(PATHS)
