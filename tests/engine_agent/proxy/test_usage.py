"""Every stream is counted by the engine itself, and only clients that asked see the count."""

import json

import pytest

from tests.engine_agent.proxy.engine import DONE, EVENTS, Turn, running_engine
from tests.engine_agent.proxy.proxy_process import running_proxy

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":11,"total_tokens":18,"completion_tokens":7}}\n\n'


async def stream(turn: Turn) -> None:
    asked = json.loads(turn.message.body).get("stream_options", {}).get("include_usage")
    await turn.send_stream([*EVENTS, *([USAGE] if asked else []), DONE])


@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}],
)
async def test_a_client_that_did_not_ask_sees_none_and_is_counted(options: dict[str, object]) -> None:
    async with running_engine(stream) as engine, running_proxy(engine) as proxy:
        answer = await proxy.complete(json.dumps({"stream": True, **options}).encode(), x_switchyard_tenant="acme")
        assert answer.body == b"".join([*EVENTS, DONE])
        use = await proxy.usage()
        assert (use.prompt_tokens_total, use.completion_tokens_total) == (11, 7)


async def test_a_client_that_asked_sees_it() -> None:
    body = json.dumps({"stream": True, "stream_options": {"include_usage": True}}).encode()
    async with running_engine(stream) as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(body)).body == b"".join([*EVENTS, USAGE, DONE])
        assert engine.requests[0].body == body


async def test_a_body_too_long_to_be_checked_at_is_counted_by_its_chunks_and_its_length() -> None:
    async def script(turn: Turn) -> None:
        await turn.send_stream([*EVENTS, DONE])

    body = json.dumps({"stream": True, "prompt": "x" * 2_000_000}).encode()
    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        assert (await proxy.complete(body, x_switchyard_tenant="acme")).body == b"".join([*EVENTS, DONE])
        assert engine.requests[0].body == body
        use = await proxy.usage()
        assert (use.prompt_tokens_total, use.completion_tokens_total) == (round(len(body) / 4), 5)
