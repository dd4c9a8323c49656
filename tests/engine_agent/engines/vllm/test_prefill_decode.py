"""Two real engines and their proxies, one that reads prompts and one that answers: one test, for two slow starts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.vllm.kv_transfer import install
from engine_agent.protocol.messages import Artifact, HandoverLoad, PrefillCell
from engine_agent.protocol.pairs import Pairs
from engine_agent.protocol.states import CellRole
from engine_agent.proxy.prefill_protocol import prefill_members
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    CACHE,
    PROMPTS,
    TOKENS,
    RunningCell,
    plan_of,
    running_cell,
)
from tests.engine_agent.proxy.engine import Engine
from tests.engine_agent.proxy.http_stream import Message, request
from tests.engine_agent.proxy.proxy_process import ProxyProcess, running_proxy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PATH, LAYOUT = "/v1/completions", "a94f01c2"
FROM_TOKENS = 16
ASKED = PROMPTS[1::2]
LONG = PROMPTS[-1]
OPTIONS = ("--model", "smollm2", "--max-concurrency", "16", "--kv-layout", LAYOUT, "--prefill-timeout-s", "120")


def test_a_pair_answers_as_one_engine_and_outlives_the_one_that_reads(artifact: Artifact, tmp_path: Path) -> None:
    install(CACHE, print)
    plan = plan_of(artifact)
    with (
        running_cell(plan, tmp_path / "prefill", nodes=1, role=CellRole.PREFILL) as prefill,
        running_cell(plan, tmp_path / "decode", nodes=1, role=CellRole.DECODE) as decode,
    ):
        asyncio.run(scenario(prefill, decode))


async def scenario(prefill: RunningCell, decode: RunningCell) -> None:
    # What one engine makes of them by itself, and leaves for nobody in its cache.
    alone = await asyncio.to_thread(prefill.texts, ASKED, TOKENS, cache_salt="alone", ignore_eos=True)
    async with (
        running_proxy(before(prefill), *OPTIONS, "--cell", "c-p", "--cell-role", "prefill") as reads,
        running_proxy(before(decode), *OPTIONS, "--cell", "c-d", "--cell-role", "decode") as answers,
    ):
        cell = PrefillCell("c-p", 3, "n-1", "127.0.0.1", reads.port, prefill.kv_port, LAYOUT, 16)
        await answers.admin("/pairs", msgspec.json.encode(Pairs("d", (cell,), prefill_from_tokens=FROM_TOKENS)))
        together = await asyncio.gather(*(ask(answers, prompt=prompt) for prompt in ASKED))
        assert [answer.json()["choices"][0]["text"] for answer in together] == [alone[prompt] for prompt in ASKED]
        load = await handovers(answers)
        assert (load.handovers_total >= 4, load.fallbacks) == (True, {}), load
        assert decode.metric("vllm:external_prefix_cache_hits_total") > 0
        assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0
        late = {"prompt": f"Again: {LONG}", "max_tokens": TOKENS, "ignore_eos": True}
        expected = await asyncio.to_thread(prefill.complete, **late, cache_salt="alone")
        params = await asyncio.to_thread(read_by, prefill, f"Again: {LONG}")
        for part in prefill.parts(0):
            part.kill()
        again = await asyncio.to_thread(decode.complete, **late, kv_transfer_params=params)
        assert again["text"] == expected["text"], "what the dead engine had read is read again"
        assert decode.health(0)[0] == 200
        after = await ask(answers, prompt=f"And once more: {LONG}")
        assert (after.status, after.json()["usage"]["completion_tokens"]) == (200, TOKENS)
        fallbacks = (await handovers(answers)).fallbacks
        assert sum(count for reason, count in fallbacks.items() if reason != "recompute") == 1, fallbacks


def before(cell: RunningCell) -> Engine:
    """Where a proxy finds the engine of a cell."""
    engine = Engine()
    engine.port = int(cell.url.rpartition(":")[2])
    return engine


async def ask(proxy: ProxyProcess, **body: Any) -> Message:
    asked = {"model": "smollm2", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **body}
    return await proxy.ask(request(PATH, json.dumps(asked).encode(), content_type="application/json"))


async def handovers(proxy: ProxyProcess) -> HandoverLoad:
    return msgspec.convert((await proxy.status())["load"]["handovers"], HandoverLoad)


def read_by(cell: RunningCell, prompt: str) -> dict[str, Any]:
    """Where a prompt lies that this engine has read."""
    members = msgspec.json.decode(b"{" + prefill_members(PATH.encode()) + b"}")
    body = {"model": "smollm2", "prompt": prompt, **members}
    answer = CLIENT.post(f"{cell.url}{PATH}", json=body, timeout=ANSWER_LIMIT_S).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params
