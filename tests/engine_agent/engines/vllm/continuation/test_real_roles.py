"""Streams of real decode cells continue at another decode cell, which reads the prompt itself. The prompt of the first
run was read by a prefill cell, whose keys and values vLLM fetched."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.cell_proxy.prefill import prefill_members
from engine_agent.engines.vllm import kv_transfer
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.states import CellRole
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.continuation.streams import marked
from tests.engine_agent.engines.vllm.continuation.test_real_continuation import CHAT, COMPLETIONS, USAGE, check_cuts
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    CACHE,
    TEXT,
    RunningCell,
    plan_of,
    running_cell,
)
from tests.engine_agent.relay.real_cells import CellEngine, behind_an_ingress, text_of

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(3600)]

ROLES = {"c-p": CellRole.PREFILL, "c-d": CellRole.DECODE, "c-e": CellRole.DECODE}
PROMPT = f"Tell me more. {TEXT * 3}"
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **USAGE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": PROMPT}], **GREEDY}),
    "completion": (COMPLETIONS, {"prompt": PROMPT, **GREEDY}),
    "penalties": (COMPLETIONS, {"prompt": f"Again. {PROMPT}", "frequency_penalty": 1.5, **GREEDY}),
}
Engines = dict[str, RunningCell]


@pytest.fixture(scope="module")
def engines(small: Artifact, forked: Begin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """One that reads prompts for the other two, all of one version."""
    kv_transfer.install(CACHE, print)
    folder, plan = tmp_path_factory.mktemp("roles"), plan_of(small)
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running_cell(plan, folder / name, nodes=1, role=role, begin=forked))
            for name, role in ROLES.items()
        }


def place_of(prefill: RunningCell, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Has the prompt of a request read. Returns where it is."""
    members = msgspec.json.decode(b"{" + prefill_members(path.encode()) + b"}")
    given = {"model": "smollm2", **body, **members, "stream_options": None}
    answer = CLIENT.post(f"{prefill.url}{path}", json=given, timeout=ANSWER_LIMIT_S)
    assert answer.status_code == 200, answer.text
    place: dict[str, Any] = answer.json()["kv_transfer_params"]
    return place


@pytest.mark.parametrize("name", CASES)
def test_a_stream_with_a_prompt_from_elsewhere_continues_as_if_it_was_not_cut(name: str, engines: Engines) -> None:
    path, body = CASES[name]
    prefill, decode, other = engines.values()
    hits = decode.metric("vllm:external_prefix_cache_hits_total")
    whole = marked(decode.url, path, {**body, "kv_transfer_params": place_of(prefill, path, body)})
    assert whole.status == 200, whole.body
    assert whole.groups
    assert decode.metric("vllm:external_prefix_cache_hits_total") > hits, "it did not read the prompt itself"
    assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0
    check_cuts(path, body, whole, other.url)


def test_a_stream_of_a_killed_decode_engine_continues_at_the_next_one(engines: Engines, tmp_path: Path) -> None:
    body = {**CASES["chat"][1], "max_tokens": 600}
    whole = list(marked(engines["c-e"].url, CHAT, {**body, "cache_salt": "alone"}).events())

    async def scenario() -> None:
        cells = {
            name: CellEngine(engine.url, ROLES[name], engine.kv_port if name == "c-p" else 0)
            for name, engine in engines.items()
        }
        async with behind_an_ingress(tmp_path, cells, "smollm2", "--prefill-timeout-s", "120") as path:
            killed: list[str] = []

            async def kill(cell: str) -> None:
                killed.append(cell)
                for part in engines[cell].parts(0):
                    part.kill()

            events = await path.stream(body, 20, kill)
            assert text_of(events) == text_of(whole)
            used = events[-1]["usage"]
            assert used == whole[-1]["usage"]
            assert (await path.continued()).total() == 1
            first, other = [await path.handovers(name) for name in (killed[0], ({"c-d", "c-e"} - {*killed}).pop())]
            assert (first.handovers_total, first.fallbacks) == (1, {})
            assert other.handovers_total == 0, "the next cell reads the prompt itself, with the tokens"
            await path.counts(used)

    asyncio.run(scenario())
