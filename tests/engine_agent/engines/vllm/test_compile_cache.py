"""torch.compile of a real vLLM: a second node with an empty cache starts with what the first one compiled, in less time
and with the same tokens."""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine_agent.node.compile_caches import ARCHIVES, COMPILED
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.running_cell import CACHE, PROMPTS, START_LIMIT_S, TOKENS, plan_of
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.node.agents import Node
from tests.engine_agent.orders import assignment, order
from tests.ports import free_ports

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[FakeControlPlane]:
    plane = FakeControlPlane()
    plane.caches = {}
    async with plane.running():
        yield plane


@pytest.mark.asyncio
async def test_a_second_node_starts_with_what_the_first_one_compiled(
    plane: FakeControlPlane, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for made in ("cache", "one", "two"):
        (tmp_path / made).mkdir(mode=0o755)
    (cache / "engines").symlink_to(CACHE / "engines")
    monkeypatch.setenv("SWITCHYARD_CACHE", str(cache))
    plan = plan_of(artifact, enforce_eager=False)
    cold = await _run(plane, tmp_path / "one", plan, "uploaded to the fleet")
    for kept in (COMPILED, ARCHIVES):  # the second node has its own disk
        shutil.rmtree(cache / kept)
    warm = await _run(plane, tmp_path / "two", plan, "fetched from the fleet")
    assert plane.caches is not None
    [(_, unpacked, content)] = plane.caches.values()
    for name, start in (("cold", cold), ("warm", warm)):
        log.info("%s: ready after %.1f s and %.1f CPU s of the engine", name, start.ready_s, start.cpu_s)
    log.info("%d bytes packed, %d unpacked", len(content), unpacked)
    assert warm.texts == cold.texts
    assert cold.compiled, "the first engine did not compile"
    assert not warm.compiled, "the second engine compiled"


@dataclass(frozen=True, slots=True)
class Start:
    """A start of an engine. `compiled`: the lines of its log that a compilation leaves."""

    ready_s: float
    cpu_s: float
    texts: list[str]
    compiled: list[str]


async def _run(plane: FakeControlPlane, folder: Path, plan: EnginePlan, state: str) -> Start:
    """Serves on a new node until its compile cache is in this state."""
    node = Node(plane, folder, free_ports(PORTS_PER_NODE))
    try:
        node.start_agent()
        await node.says("idle", 0, START_LIMIT_S)
        began = time.monotonic()
        await plane.order(order(1, assignment(plan=plan), node=node.id))
        await node.says("ready", 1, START_LIMIT_S)
        ready_s, cpu_s = time.monotonic() - began, _cpu_s(node.observed.engine_pid)

        def says_so() -> bool:
            return [each.state for each in node.reports[-1].telemetry.compile_caches] == [state]

        await eventually(says_so, 600.0, state)
        url = f"http://127.0.0.1:{node.port_base + PROXY}/v1/completions"
        bodies = [{"model": "smollm2", "prompt": text, "max_tokens": TOKENS, "temperature": 0} for text in PROMPTS[:4]]
        answers = [(await asyncio.to_thread(partial(CLIENT.post, url, json=body))).json() for body in bodies]
        compiled = [
            line
            for line in (node.home / "engine.log").read_text().splitlines()
            if "saved AOT compiled function" in line
        ]
        return Start(ready_s, cpu_s, [answer["choices"][0]["text"] for answer in answers], compiled)
    finally:
        assert await asyncio.to_thread(node.stop) == 0


def _cpu_s(pid: int | None) -> float:
    """Of a process and its children, also of those that ended."""
    engine = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:4]) for each in (engine, *engine.children(recursive=True)))
