"""The engine counts every stream, and only clients that requested usage get it."""

import asyncio
import json

import pytest

from engine_agent.protocol.load_messages import UsageRow
from tests.engine_agent.cell_proxy.engine import DONE, EVENTS, STREAM_HEAD, Turn, chunk, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

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


LEDGER = {"/switchyard/usage": json_answer(b'{"prompt_tokens":21,"cached_tokens":16,"completion_tokens":4}')}
LONG = json.dumps({"stream": True, "prompt": "x" * 2_000_000}).encode()
ASKED = {**json.loads(LONG), "stream_options": {"include_usage": True}}


async def settled(proxy: ProxyProcess) -> UsageRow:
    """The row of the tenant, once it has no requests in flight."""

    async def is_settled() -> bool:
        return (await proxy.usage()).in_flight == 0

    await until(is_settled, "the request is settled")
    return await proxy.usage()


async def without_usage(turn: Turn) -> None:
    await turn.send_stream([*EVENTS, DONE])


async def endless(turn: Turn) -> None:
    await turn.send(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nX-Switchyard-Prompt-Tokens: 21\r\n\r\n"))
    for event in EVENTS:
        await turn.send(chunk(event))
    await turn.gone.wait()


async def test_an_answer_that_does_not_say_what_it_used_is_asked_for_at_the_engine() -> None:
    async with running_engine(without_usage) as engine, running_proxy(engine) as proxy:
        engine.ledger = LEDGER
        assert (await proxy.complete(LONG, x_switchyard_tenant="acme")).body == b"".join([*EVENTS, DONE])
        assert engine.requests[0].json() == ASKED
        row = await settled(proxy)
        assert (row.prompt_tokens_total, row.cached_tokens_total, row.completion_tokens_total) == (21, 16, 4)
        assert (row.estimated_total, row.cancelled_total) == (0, 0)
        assert engine.asked_for_usage == [engine.requests[0].headers["x-switchyard-exchange"]]


async def test_where_no_engine_says_it_is_estimated_and_that_is_said() -> None:
    async with running_engine(without_usage) as engine, running_proxy(engine) as proxy:
        await proxy.complete(LONG, x_switchyard_tenant="acme")
        row = await settled(proxy)
        assert (row.prompt_tokens_total, row.completion_tokens_total) == (round(len(LONG) / 4), 5)
        assert row.estimated_total == 1


@pytest.mark.parametrize("ledger", [LEDGER, {}])
async def test_a_client_that_leaves_pays_for_what_was_computed_and_no_more(ledger: dict[str, bytes]) -> None:
    async with running_engine(endless) as engine, running_proxy(engine) as proxy:
        engine.ledger = ledger
        body = request("/v1/completions", b'{"stream": true}', x_switchyard_tenant="acme", x_switchyard_key="0a0b0c0d")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(body)
        headers = (await read_head(reader))[1]
        assert headers["x-switchyard-prompt-tokens"] == "21"
        seen = b""
        while seen.count(b"\n\n") < len(EVENTS):
            seen += await read_chunk(reader)
        writer.close()
        row = await settled(proxy)
        assert (row.key, row.requests_total, row.cancelled_total, row.errors_total) == ("0a0b0c0d", 1, 1, 0)
        assert row.prompt_tokens_total == 21
        assert (row.completion_tokens_total, row.estimated_total) == ((4, 0) if ledger else (5, 1))


async def test_a_request_that_the_engine_refused_used_nothing_and_is_not_asked_for() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(json_answer(b'{"error":{"message":"no"}}', b"400 Bad Request"))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        engine.ledger = LEDGER
        assert (await proxy.complete(x_switchyard_tenant="acme")).status == 400
        row = await settled(proxy)
        assert (row.prompt_tokens_total, row.completion_tokens_total, row.estimated_total) == (0, 0, 0)
        assert engine.asked_for_usage == []


async def test_a_name_that_a_client_gives_its_request_is_not_the_engines() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        for _ in range(2):
            await proxy.complete(x_switchyard_exchange="mine")
        names = [each.headers["x-switchyard-exchange"] for each in engine.requests]
        assert len({"mine", *names}) == 3


@pytest.mark.parametrize(
    ("path", "usage", "tokens"),
    [
        ("/v1/responses", {"input_tokens": 31, "output_tokens": 2}, (31, 2)),
        ("/v1/messages", {"input_tokens": 30, "output_tokens": 2, "cache_read_input_tokens": 5}, (35, 2)),
        ("/v1/embeddings", {"prompt_tokens": 7, "total_tokens": 7}, (7, 0)),
        ("/rerank", {"prompt_tokens": 8, "total_tokens": 8}, (8, 0)),
        ("/tokenize", {"prompt_tokens": 8, "total_tokens": 8}, (0, 0)),
    ],
)
async def test_every_path_is_counted_in_its_own_form(path: str, usage: dict[str, int], tokens: tuple[int, int]) -> None:
    async def script(turn: Turn) -> None:
        long = {"prompt_logprobs": ["x" * 50] * 50, "tools": [{"usage": {"prompt_tokens": 1}}]}
        await turn.send(json_answer(json.dumps({"usage": usage, **long}).encode()))

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        answer = await proxy.ask(request(path, b"{}", x_switchyard_tenant="acme"))
        assert answer.status == 200
        row = await settled(proxy)
        assert (row.prompt_tokens_total, row.completion_tokens_total) == tokens
        assert row.estimated_total == 0
        reported = [answer.headers.get(f"x-switchyard-{kind}-tokens") for kind in ("prompt", "completion")]
        assert reported == ([str(count) for count in tokens] if path != "/tokenize" else [None, None])
