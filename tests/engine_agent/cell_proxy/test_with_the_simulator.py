"""The real proxy in front of the real simulator: disconnects and deadlines stop the engine's work, and urgent requests
go first."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.protocol.load_messages import CacheLoad
from engine_agent.protocol.local_servers import long_poll_query
from engine_agent.protocol.proxy_messages import decode_prefixes, digits_of
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_chunk, read_head, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.engines.sim.cells import CHAT, ENDLESS, MODEL, Cell, Member

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
PATH = "/v1/chat/completions"


@asynccontextmanager
async def cell(home: Path, *arguments: str, max_concurrency: int = 4) -> AsyncIterator[tuple[ProxyProcess, Member]]:
    """A simulated cell of one node and its proxy. Its version takes images."""
    engines = Cell(home, followers=0)
    leader = engines.start(0, "--modality", "image", *arguments)
    engine = Engine()
    engine.port = int(leader.url.rpartition(":")[2])
    try:
        options = ("--priorities", "--model", MODEL, "--modality", "image")
        async with running_proxy(engine, *options, max_concurrency=max_concurrency) as proxy:
            yield proxy, leader
    finally:
        engines.stop()


async def metric_is(leader: Member, name: str, value: float) -> bool:
    return await asyncio.to_thread(leader.metric, name) == value


async def is_settled(proxy: ProxyProcess) -> bool:
    return (await proxy.usage()).in_flight == 0


async def ask(proxy: ProxyProcess, body: dict[str, Any], **headers: str) -> Message:
    return await proxy.ask(request(PATH, json.dumps(body).encode(), **headers))


async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path) -> None:
    async with cell(tmp_path) as (proxy, leader):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(PATH, json.dumps(ENDLESS).encode(), x_switchyard_tenant="acme"))
        await read_head(reader)
        await read_chunk(reader)
        assert await metric_is(leader, "vllm:num_requests_running", 1)
        writer.close()
        await until(lambda: metric_is(leader, "vllm:num_requests_running", 0), "the engine stops")
        await until(lambda: is_settled(proxy), "its tokens are counted")
        use = await proxy.usage()
        assert use.prompt_tokens_total > 0
        assert use.completion_tokens_total > 0
        assert (use.cancelled_total, use.estimated_total) == (1, 0)


async def test_a_deadline_stops_the_engine_and_a_stream_says_so(tmp_path: Path) -> None:
    async with cell(tmp_path) as (proxy, leader):
        answer = await ask(proxy, ENDLESS, x_switchyard_deadline_ms="300")
        assert b'"code":"deadline_exceeded"' in answer.body
        whole = await ask(proxy, {**ENDLESS, "stream": False}, x_switchyard_deadline_ms="300")
        assert whole.status == 504
        await until(lambda: metric_is(leader, "vllm:num_requests_running", 0), "the engine stops")


async def test_what_the_engine_counted_is_what_is_reported(tmp_path: Path) -> None:
    async with cell(tmp_path) as (proxy, _):
        body = {**CHAT, "max_tokens": 7, "ignore_eos": True}
        streamed = await ask(proxy, {**body, "stream": True}, x_switchyard_tenant="acme")
        assert b'"usage"' not in streamed.body
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        whole = (await ask(proxy, body, x_switchyard_tenant="acme")).json()["usage"]
        await until(lambda: is_settled(proxy), "its tokens are counted")
        use = await proxy.usage()
        assert use.prompt_tokens_total == 2 * whole["prompt_tokens"]
        assert use.completion_tokens_total == 14


async def test_images_reach_an_engine_that_takes_them(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    async with cell(tmp_path) as (proxy, _):
        for part, status in ((image, 200), (sound, 400)):
            messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
            answer = await ask(proxy, {**CHAT, "messages": messages})
            assert answer.status == status
            assert ("choices" in answer.json()) == (part is image)


async def test_batch_requests_are_begun_one_by_one_as_the_simulator_says_that_it_has_read_their_prompts(
    tmp_path: Path,
) -> None:
    async with cell(tmp_path, max_concurrency=6) as (proxy, leader):
        body = {**ENDLESS, "stream": False}
        batch = [asyncio.create_task(ask(proxy, body, x_switchyard_class="batch")) for _ in range(3)]
        await until(lambda: metric_is(leader, "vllm:num_requests_running", 3), "all three are answered")
        for each in batch:
            each.cancel()
        await until(lambda: metric_is(leader, "vllm:num_requests_running", 0), "the engine stops")


async def test_a_real_time_request_takes_the_place_of_batch_work(tmp_path: Path) -> None:
    async with cell(tmp_path, "--max-num-seqs", "1", max_concurrency=6) as (proxy, leader):
        ended: list[str] = []

        async def run(serving_class: str) -> None:
            body = {**CHAT, "max_tokens": 100, "ignore_eos": True}
            assert (await ask(proxy, body, x_switchyard_class=serving_class)).status == 200
            ended.append(serving_class)

        batch = [asyncio.create_task(run("batch")) for _ in range(2)]
        await until(lambda: metric_is(leader, "vllm:num_requests_waiting", 1), "one runs, and one waits")
        await asyncio.gather(run("realtime"), *batch)
        assert ended == ["realtime", "batch", "batch"]


async def test_a_simulator_that_is_well_is_asked_seldom_and_says_at_once_when_it_is_not(tmp_path: Path) -> None:
    async with cell(tmp_path) as (proxy, leader):
        await until(proxy.is_healthy, "the cell is up")
        known = (await proxy.status())["state"]
        assert known
        assert (await proxy.status(long_poll_query(known)))["state"] == known  # after a moment, as nothing happened
        await asyncio.to_thread(leader.inject, kind="unready")
        await until(proxy.is_unhealthy, "the fault reaches the proxy")
        status, why = await proxy.health_check()
        assert (status, "injected fault: unready" in why) == (503, True)
        assert (await proxy.status())["state"] == ""  # an unhealthy cell is polled often
        await asyncio.to_thread(leader.lift_faults)
        await until(proxy.is_healthy, "the fault is lifted")


async def test_the_proxy_lists_the_beginnings_of_what_the_engine_has_computed(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(400))
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
    ends = (800, 1600, 2400)
    hashes = ("00000000000a", "00000000000b", "00000000000c")
    named = f"{len(words)}:{','.join(map(str, ends))}:{''.join(hashes)}"
    async with cell(tmp_path) as (proxy, _):

        async def listed() -> list[str]:
            answer = await proxy.ask(request("/switchyard/cache-prefixes?life=&after=0", method="GET"))
            changes = decode_prefixes(answer.body)
            return sorted(digits_of(changes.added)) if changes.is_known else []

        assert (await ask(proxy, body, x_switchyard_cache_prefixes=named)).status == 200
        await until(lambda: _is(listed(), list(hashes)), "its beginnings are listed")
        matched = {"x_switchyard_cache_prefixes": named, "x_switchyard_cache_matched": "2400"}
        assert (await ask(proxy, body, **matched)).status == 200

        async def cache() -> CacheLoad:
            return msgspec.convert((await proxy.status())["load"]["cache"], CacheLoad)

        async def compared() -> bool:
            seen = await cache()
            predicted, found = seen.predicted_tokens_total, seen.found_tokens_total
            return seen.asked_tokens_total > 0 and 0 < predicted <= found + seen.block_tokens

        await until(compared, "what was predicted is compared with what was found")
        before = await cache()
        assert (await ask(proxy, body, **matched, x_switchyard_cache_scope="tenant:acme")).status == 200

        async def nothing_more_was_found() -> bool:
            after = await cache()
            assert after.found_tokens_total == before.found_tokens_total, "another tenant's prompt"
            return after.asked_tokens_total > before.asked_tokens_total

        await until(nothing_more_was_found, "a tenant finds nothing of others")


async def _is(finding: Awaitable[list[str]], wanted: list[str]) -> bool:
    return await finding == wanted
