"""The real proxy with real vLLM: disconnects and timeouts stop the engine, usage is counted, and the engine follows
priorities."""

import asyncio
import json
from typing import Any

import msgspec

from engine_agent.protocol.load_messages import TokenCheck, UsageRow
from tests.asking import CLIENT
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_body, read_chunk, read_head, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.engines.request_table import TABLE, Outcome, Row, outcome_of

PATH = "/v1/completions"
ENDLESS = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
CHAT = [{"role": "user", "content": "Say why"}]
MIXED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": "Say why", "max_tokens": 3, "n": 2}),
    ("/v1/completions", {"prompt": ["Say why", "Say"], "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "Say why", "max_tokens": 2, "prompt_logprobs": 3}),
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "stop": ["a", "e"]}),
    ("/v1/responses", {"input": "Say why", "max_output_tokens": 3, "store": False}),
    ("/v1/responses", {"input": "Say why", "max_output_tokens": 3, "store": False, "stream": True}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3, "stream": True}),
)
"""Each form in which an engine reports usage."""
SHORT = {"model": "smollm2", "prompt": "Say why", "max_tokens": 12, "ignore_eos": True}


async def busy(url: str) -> int:
    """Requests that the engine computes or keeps waiting."""
    page = (await asyncio.to_thread(CLIENT.get, f"{url}/metrics")).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return int(sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(names)))


async def ask(proxy: ProxyProcess, body: dict[str, Any], **headers: str) -> Message:
    return await proxy.ask(request(PATH, json.dumps(body).encode(), content_type="application/json", **headers))


async def proxy_controls_the_engine(url: str) -> None:
    """Starts a proxy for the engine at `url`, and checks that it stops, counts and orders the engine's work."""
    engine = Engine()
    engine.port = int(url.rpartition(":")[2])

    async def engine_is_idle() -> bool:
        return await busy(url) == 0

    async with running_proxy(engine, "--priorities", "--model", "smollm2", max_concurrency=8) as proxy:
        await leave_in_the_middle(proxy)
        await until(engine_is_idle, "the engine stops for a client that left")
        late = await ask(proxy, ENDLESS, x_switchyard_deadline_ms="1500")
        assert b'"code":"deadline_exceeded"' in late.body
        await until(engine_is_idle, "the engine stops at a deadline")
        await usage_is_counted_and_hidden(proxy)
        assert await order_of_the_end(proxy, url) == ["realtime", "batch", "batch"]
        await every_token_is_counted(proxy)


async def outcomes_of_the_table(url: str) -> list[tuple[Row, Outcome]]:
    """Returns the proxy's answer to each request of the table."""
    engine = Engine()
    engine.port = int(url.rpartition(":")[2])
    async with running_proxy(engine, "--priorities", "--model", "smollm2") as proxy:
        return [(row, await outcome_of(proxy.port, row)) for row in TABLE]


async def leave_in_the_middle(proxy: ProxyProcess) -> None:
    reader, writer = await streaming(proxy)
    await read_chunk(reader)
    writer.close()


async def streaming(proxy: ProxyProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An endless answer that has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(request(PATH, json.dumps(ENDLESS).encode(), content_type="application/json"))
    head = await read_head(reader)
    assert head[0] == "HTTP/1.1 200 OK", (await read_body(reader, *head)).body
    return reader, writer


async def usage_is_counted_and_hidden(proxy: ProxyProcess) -> None:
    streamed = await ask(proxy, {**SHORT, "stream": True}, x_switchyard_tenant="acme")
    assert b'"completion_tokens"' not in streamed.body
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    whole = (await ask(proxy, SHORT)).json()["usage"]
    use = await proxy.usage()
    assert (use.prompt_tokens_total, use.completion_tokens_total) == (whole["prompt_tokens"], 12)


async def counts(proxy: ProxyProcess) -> tuple[list[UsageRow], TokenCheck | None]:
    """The proxy's counts, and those that it last compared with."""
    load = (await proxy.status())["load"]
    return msgspec.convert(load["usage"], list[UsageRow]), msgspec.convert(load["token_check"], TokenCheck | None)


async def every_token_is_counted(proxy: ProxyProcess) -> None:
    """Requests of every form, and one that is cut: the engine's metrics grow by the same."""
    since = {"requests": 0}

    async def is_compared() -> bool:
        rows, check = await counts(proxy)
        since["requests"] = sum(row.requests_total for row in rows)
        return check is not None and not any(row.in_flight for row in rows)

    await until(is_compared, "the comparison begins")
    first = (await counts(proxy))[1]
    for path, body in MIXED:
        text = json.dumps({"model": "smollm2", **body}).encode()
        answer = await proxy.ask(request(path, text, content_type="application/json"))
        assert answer.status == 200, (path, answer.body)
    await leave_in_the_middle(proxy)

    async def is_compared_again() -> bool:
        rows, check = await counts(proxy)
        return check not in {None, first} and not any(row.in_flight for row in rows)

    await until(is_compared_again, "everything is compared")
    rows, check = await counts(proxy)
    assert check is not None
    assert (check.engine_prompt_total, check.engine_completion_total) == (
        check.counted_prompt_total,
        check.counted_completion_total,
    )
    assert sum(row.requests_total for row in rows) == since["requests"] + len(MIXED) + 1
    assert sum(row.estimated_total for row in rows) == 0


async def order_of_the_end(proxy: ProxyProcess, url: str) -> list[str]:
    """One slot, which a stream holds until two batch requests and after them a real-time one wait for it: the second of
    the batch requests in the proxy, until the prompt of the first is read."""
    ended: list[str] = []

    async def run(serving_class: str) -> None:
        answer = await ask(proxy, SHORT, x_switchyard_class=serving_class)
        assert answer.status == 200, answer.body
        ended.append(serving_class)

    async def in_the_engine(requests: int) -> None:
        async def are_there() -> bool:
            return await busy(url) == requests

        await until(are_there, f"{requests} requests are in the engine")

    async def one_waits_in_the_proxy() -> bool:
        batch = (await proxy.status())["load"]["batch"]
        return bool(batch.get("waiting", 0) == 1)  # zeros are omitted

    _, holder = await streaming(proxy)
    waiting = [asyncio.create_task(run("batch"))]
    await in_the_engine(2)
    waiting.append(asyncio.create_task(run("batch")))
    await until(one_waits_in_the_proxy, "a batch request waits in the proxy")
    waiting.append(asyncio.create_task(run("realtime")))
    await in_the_engine(3)
    holder.close()
    await asyncio.gather(*waiting)
    return ended
