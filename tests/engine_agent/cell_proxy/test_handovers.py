"""Handovers of a decode cell: when it hands over, which senders may, the counts, and the fallback after every
failure."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.cell_proxy.prefill import HANDOVER_HEADER
from engine_agent.protocol.identity import IdentityKind
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.pair import COMPLETIONS, DECODE_NODE, LAYOUT, PREFILL_NODE, Half, Pair, running_pair
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.engines.sim.cells import MODEL
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
INGRESS, NODE = IdentityKind.INGRESS, IdentityKind.NODE
LONG = {"prompt": "one of many words in a long prompt " * 20, "max_tokens": 8}
HANDOVER = HANDOVER_HEADER.decode().replace("-", "_")


async def answered(pair: Pair, body: dict[str, Any], **headers: str) -> Any:
    answer = await pair.send(body, **headers)
    assert answer.status == 200, answer.body
    return answer.json()


async def nothing_is_kept(half: Half) -> bool:
    return await half.metric("sim:kv_kept_requests") == 0


async def test_a_long_prompt_is_read_by_the_prefill_cell_and_counted_once(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        short = await answered(pair, {"prompt": "few words", "max_tokens": 4})
        assert short["usage"]["completion_tokens"] == 4
        assert (await pair.decode.handovers()).alone == {"short": 1}
        together = await answered(pair, LONG, x_switchyard_tenant="acme")
        alone = await answered(pair, {**LONG, "n": 2})
        assert together["choices"][0]["text"] == alone["choices"][0]["text"], "as without the other cell"
        reported = await pair.decode.handovers()
        assert (reported.handovers_total, reported.in_flight) == (1, 0)
        assert (reported.alone, reported.transfer_p50_ms is not None) == ({"short": 1, "unsupported": 1}, True)
        prompt = together["usage"]["prompt_tokens"]
        used = await pair.decode.proxy.usage()
        assert (used.prompt_tokens_total, used.completion_tokens_total, used.cached_tokens_total) == (prompt, 8, 0)
        reads = (await pair.prefill.proxy.status())["load"]
        assert (reads["usage"], reads["requests_total"]) == ([], 0), "what it read counts for no tenant"
        assert reads["handovers"]["prefill_tokens_total"] == prompt
        assert await pair.decode.metric("vllm:external_prefix_cache_hits_total") == prompt - 1
        assert await nothing_is_kept(pair.prefill)


async def test_a_stream_and_a_prompt_of_token_ids_are_handed_over_too(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        body = {"prompt": list(range(100)), "max_tokens": 5, "stream": True}
        answer = await pair.send(body)
        assert answer.body.count(b"data: ") == 6
        chat = {"messages": [{"role": "user", "content": LONG["prompt"]}], "max_completion_tokens": 5, "min_tokens": 3}
        assert (await pair.send(chat, "/v1/chat/completions")).json()["usage"]["completion_tokens"] == 5
        assert (await pair.decode.handovers()).handovers_total == 2


async def test_only_decode_cells_of_its_own_have_prompts_read(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:

        async def asked(kind: IdentityKind, subject: str, half: Half, node: str, **headers: str) -> Message:
            reader, writer = await pair.connect(kind, subject, half, node)
            try:
                writer.write(request(COMPLETIONS, msgspec.json.encode({"model": MODEL, **LONG}), **headers))
                return await read_message(reader)
            finally:
                writer.transport.abort()

        ours = {HANDOVER: LAYOUT}
        refused = await asked(INGRESS, "i-1", pair.prefill, PREFILL_NODE, **ours)
        assert (refused.status, "an ingress may not" in refused.json()["error"]["message"]) == (403, True)
        plain = await asked(INGRESS, "i-1", pair.prefill, PREFILL_NODE)
        assert (plain.status, plain.json()["error"]["code"]) == (503, "prefill_cell")
        other_way = await asked(INGRESS, "i-1", pair.decode, DECODE_NODE, **ours)
        assert (other_way.status, other_way.json()["error"]["code"]) == (403, "no_prefill_cell")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asked(NODE, "n-00000bad", pair.prefill, PREFILL_NODE, **ours)
        other_layout = await asked(NODE, DECODE_NODE, pair.prefill, PREFILL_NODE, **{HANDOVER: "other"})
        assert (other_layout.status, other_layout.json()["error"]["code"]) == (409, "other_kv_layout")
        assert (await asked(NODE, DECODE_NODE, pair.prefill, PREFILL_NODE, **ours)).status == 200
        assert (await asked(NODE, DECODE_NODE, pair.prefill, PREFILL_NODE)).status == 409, "and nothing else"


async def test_an_application_names_no_memory(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        forged = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": 9}
        answer = await pair.send({**LONG, "kv_transfer_params": {**forged, "remote_request_id": "x"}})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_prefill_cell_that_is_another_one_is_not_asked(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        for changes, reason in (
            ({"kv_layout": "another"}, {"no_cell": 1}),
            ({"node": "n-0000000x"}, {"no_cell": 1}),
        ):
            await pair.pair(**changes)
            await answered(pair, LONG)
            assert (await pair.decode.handovers()).alone == reason
        assert (await pair.decode.handovers()).fallbacks == {"unreachable": 1}, "its certificate is another's"


@pytest.mark.parametrize("killed", ["engine", "proxy"])
async def test_a_dead_prefill_cell_costs_a_reading(tmp_path: Path, killed: str) -> None:
    async with running_pair(tmp_path) as pair:
        victim = pair.prefill.engine.process if killed == "engine" else pair.prefill.proxy.process
        victim.kill()
        for _each in range(3):
            await answered(pair, LONG)
        reported = await pair.decode.handovers()
        assert (reported.handovers_total, sum(reported.fallbacks.values())) == (0, 1)
        assert reported.alone in ({"no_cell": 2}, {"cached": 2}), "it is left alone for a while"


async def test_a_prefill_engine_that_dies_after_its_answer_costs_a_reading(tmp_path: Path) -> None:
    async with running_pair(tmp_path, decode=("--base-ms", "60000")) as pair:
        asking = asyncio.create_task(answered(pair, LONG))
        await until(lambda: _has_handed_over(pair), "the prompt is read")
        pair.prefill.engine.process.kill()
        assert (await asking)["usage"]["completion_tokens"] == 8
        assert await pair.decode.metric("vllm:nixl_num_failed_transfers_total") == 1


async def _has_handed_over(pair: Pair) -> bool:
    return bool((await pair.decode.handovers()).handovers_total == 1)


@pytest.mark.long
async def test_a_slow_prefill_cell_is_not_waited_for(tmp_path: Path) -> None:
    async with running_pair(tmp_path, proxy_options=("--prefill-timeout-s", "0.5")) as pair:
        await asyncio.to_thread(pair.prefill.engine.inject, kind="hang")
        answer = await answered(pair, LONG, x_switchyard_deadline_ms="60000")
        assert answer["usage"]["completion_tokens"] == 8
        assert (await pair.decode.handovers()).fallbacks in ({"slow": 1}, {"failed": 1})


async def test_a_client_that_leaves_stops_both(tmp_path: Path) -> None:
    async with running_pair(tmp_path, prefill=("--prefill-tokens-per-s", "1")) as pair:
        _, writer = await pair.connect(INGRESS, "i-1", pair.decode, DECODE_NODE)
        writer.write(request(COMPLETIONS, msgspec.json.encode({"model": MODEL, **LONG})))
        await until(lambda: _runs(pair.prefill), "the prompt is being read")
        writer.transport.abort()
        await until(lambda: _is_idle(pair.prefill), "the prefill engine stops")
        assert await nothing_is_kept(pair.prefill)
        assert (await pair.decode.handovers()).in_flight == 0


async def _runs(half: Half) -> bool:
    return await half.metric("vllm:num_requests_running") == 1


async def _is_idle(half: Half) -> bool:
    return await half.metric("vllm:num_requests_running") == 0


@pytest.mark.long
async def test_what_no_decode_engine_takes_is_forgotten_with_its_lease(tmp_path: Path) -> None:
    async with running_pair(tmp_path, prefill=("--lease-s", "0.05")) as pair:
        reader, writer = await pair.connect(NODE, DECODE_NODE, pair.prefill, PREFILL_NODE)
        writer.write(request(COMPLETIONS, msgspec.json.encode({"model": MODEL, **LONG}), **{HANDOVER: LAYOUT}))
        assert (await read_message(reader)).status == 200
        writer.transport.abort()
        await until(lambda: nothing_is_kept(pair.prefill), "its lease ends")
        assert await pair.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_pairs_are_told_and_named(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as pair:
        bad = await pair.decode.proxy.admin("/pairs", b'{"prefill_cells": 7}')
        assert (bad.status, bad.json()["error"]["code"]) == (400, "bad_pairs")
        assert (await pair.decode.proxy.status())["pairs"] == "d-1"
        page = (await pair.decode.proxy.admin("/metrics")).body
        assert b"switchyard_proxy_handovers_total" in page
        with contextlib.suppress(ConnectionError):
            await pair.pair(port=free_port())
        await answered(pair, LONG)
        assert (await pair.decode.handovers()).fallbacks == {"unreachable": 1}
