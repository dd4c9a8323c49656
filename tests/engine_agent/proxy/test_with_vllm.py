"""The real proxy before real vLLM, started as a version that asks for priorities says: who leaves or is late stops the
engine, usage is counted, and the engine takes the priorities that it is told."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_agent.engines.base import EngineContext
from engine_agent.engines.registry import engine_adapter, engine_pythons
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import EnginePlan
from engine_agent.protocol.ports import ENGINE, PORTS_PER_NODE
from models_registry.planning.engine_arguments import render_engine_plan
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.versions import VersionSpec
from tests.asking import CLIENT
from tests.engine_agent.orders import assignment
from tests.engine_agent.proxy.engine import Engine
from tests.engine_agent.proxy.http_stream import Message, read_body, read_chunk, read_head, request
from tests.engine_agent.proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.runtime.agents import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()
START_LIMIT_S = 240.0
PATH = "/v1/completions"
SPEC = VersionSpec(
    model="smollm2",
    version="1",
    engine="vllm",
    artifact_uri="file:///weights",
    artifact_digest="sha256:ab",
    context_length=2048,
    max_concurrency=4,
    ready_timeout_s=START_LIMIT_S,
    parallelism={"local.cpu": {"nodes": 1}},
    engine_options={
        "enforce_eager": True,
        "kv_cache_memory_bytes": 134217728,
        "max_num_seqs": 1,
        "scheduling_policy": "priority",
    },
    engine_env={},
    golden_prompts=(),
)
ENDLESS = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = {"model": "smollm2", "prompt": "Say why", "max_tokens": 12, "ignore_eos": True}


def plan() -> EnginePlan:
    build = ("-m", "engine_agent.engines.vllm.weights", "build", "--cache", str(CACHE), "--ranks", "2")
    command = [str(install(CACHE, print)), *build]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600, check=True)
    weights = json.loads(built.stdout.splitlines()[-1])
    spec = replace(SPEC, artifact_uri=weights["uri"], artifact_digest=weights["digest"])
    return render_engine_plan(spec, INSTANCE_TYPES["local.cpu"])


@asynccontextmanager
async def vllm(home: Path) -> AsyncIterator[str]:
    """URL of a real engine."""
    base = free_ports(PORTS_PER_NODE)
    context = EngineContext(f"n-{os.getpid():08x}", home, "127.0.0.1", base, ROOT, engine_pythons(CACHE))
    launch = engine_adapter("vllm").launch(assignment(plan=await asyncio.to_thread(plan)), context)
    log = home / "engine.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *launch.argv, env={**os.environ, **launch.env}, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{base + ENGINE}"
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await is_healthy(url):
                assert process.returncode is None, log.read_text(errors="replace")[-3000:]
                await asyncio.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()


async def is_healthy(url: str) -> bool:
    try:
        return (await asyncio.to_thread(CLIENT.get, f"{url}/health", timeout=2)).status_code == 200
    except httpx.TransportError:
        return False


async def busy(url: str) -> int:
    """Requests that the engine computes or keeps waiting."""
    page = (await asyncio.to_thread(CLIENT.get, f"{url}/metrics")).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return int(sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(names)))


async def ask(proxy: ProxyProcess, body: dict[str, Any], **headers: str) -> Message:
    return await proxy.ask(request(PATH, json.dumps(body).encode(), content_type="application/json", **headers))


@pytest.mark.asyncio
async def test_the_proxy_rules_a_real_engine(tmp_path: Path) -> None:
    async with vllm(tmp_path) as url:
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
            assert await order_of_the_end(proxy, url) == ["batch", "realtime", "batch", "batch"]


async def leave_in_the_middle(proxy: ProxyProcess) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(request(PATH, json.dumps(ENDLESS).encode(), content_type="application/json"))
    head = await read_head(reader)
    assert head[0] == "HTTP/1.1 200 OK", (await read_body(reader, *head)).body
    await read_chunk(reader)
    writer.close()


async def usage_is_counted_and_hidden(proxy: ProxyProcess) -> None:
    streamed = await ask(proxy, {**SHORT, "stream": True}, x_switchyard_tenant="acme")
    assert b'"completion_tokens"' not in streamed.body
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    whole = (await ask(proxy, SHORT)).json()["usage"]
    use = (await proxy.status())["load"]["tenants"]["acme"]
    assert (use["prompt_tokens_total"], use["completion_tokens_total"]) == (whole["prompt_tokens"], 12)


async def order_of_the_end(proxy: ProxyProcess, url: str) -> list[str]:
    """One slot; three batch requests are there when a real-time one comes."""
    ended: list[str] = []

    async def run(serving_class: str) -> None:
        answer = await ask(proxy, {**SHORT, "max_tokens": 100}, x_switchyard_class=serving_class)
        assert answer.status == 200, answer.body
        ended.append(serving_class)

    async def three_are_there() -> bool:
        return await busy(url) == 3

    batch = [asyncio.create_task(run("batch")) for _ in range(3)]
    await until(three_are_there, "three batch requests are in the engine")
    await asyncio.gather(run("realtime"), *batch)
    return ended
