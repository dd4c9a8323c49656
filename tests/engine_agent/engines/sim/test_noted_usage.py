"""The usage in the ledger equals that of the answer and of the metrics, also if the client disconnects."""

import json
from typing import Any

import pytest

from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.proxy_messages import COUNTED_APART_PATH, PROMPT_TOKENS_HEADER, USAGE_PATH
from tests.engine_agent.engines.sim.in_process import MODEL, Application, application

pytestmark = pytest.mark.asyncio
STORY = [{"role": "user", "content": "tell me a story"}]


async def noted(served: Application, exchange: str) -> tuple[int, int]:
    status, usage = await served.send(f"{USAGE_PATH}?exchange={exchange}", b"", "GET")
    assert status == 200
    body = json.loads(usage)
    return body["prompt_tokens"], body["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": STORY, "n": 3, "max_tokens": 5}),
        ("/v1/completions", {"prompt": ["one two", "three"], "n": 2}),
        ("/v1/embeddings", {"input": ["a b c", "d"]}),
    ],
)
async def test_of_a_whole_answer(path: str, body: dict[str, Any]) -> None:
    async with application() as served:
        _, answer = await served.send(path, json.dumps({"model": MODEL, **body}).encode(), exchange=b"x1")
        usage = json.loads(answer)["usage"]
        apart = await served.send(COUNTED_APART_PATH, b"", "GET")

        assert int(served.headers[PROMPT_TOKENS_HEADER]) == usage["prompt_tokens"]
        assert await noted(served, "x1") == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (served.meters.prompt_tokens, served.meters.generation_tokens) == await noted(served, "x1")
        assert json.loads(apart[1]) == {"prompt_tokens": 0, "completion_tokens": 0}


async def test_of_an_answer_that_its_client_leaves() -> None:
    unhurried = ModelParameters(decode_step_ms=5, decode_step_per_seq_ms=0)
    asked = {"model": MODEL, "messages": STORY, "n": 2, "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with application(unhurried) as served:
        await served.send("/v1/chat/completions", json.dumps(asked).encode(), exchange=b"x2", leaves_after=5)

        prompt, completion = await noted(served, "x2")
        assert prompt == 4
        assert 4 <= completion < 10_000
        assert (served.meters.prompt_tokens, served.meters.generation_tokens) == (prompt, completion)
