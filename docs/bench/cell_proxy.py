"""The cell proxy before real vLLM: how soon the engine stops for who left or is late, whether usage is counted and kept
from who did not ask, and what priority does for a real-time request behind batch work.

    BENCH_PORTS=16400 python docs/bench/cell_proxy.py [--rounds 5]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from executor_cell import FIRST_PORT, ROOT, Engine

PROXY, ADMIN, AGENT_CHECK = FIRST_PORT + 100, FIRST_PORT + 101, FIRST_PORT + 102
SLOTS = 2
CONCURRENCY = 12
PRIORITY_ARGS = ("--scheduling-policy", "priority", "--max-num-seqs", str(SLOTS))
LIMIT_S = 60.0
ENDLESS = {"model": "m", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = {"model": "m", "prompt": "Say why", "max_tokens": 24, "ignore_eos": True, "temperature": 0}


def proxy_process(engine: Engine, *, priorities: bool) -> "subprocess.Popen[bytes]":
    named = f"--node-id n-0000beef --cell c-bench --generation 1 --port {PROXY} --admin-port {ADMIN} --model m "
    named += f"--agent-check-port {AGENT_CHECK} --engine {engine.url} --max-concurrency {CONCURRENCY}"
    flags = ["--priorities"] if priorities else []
    command = [sys.executable, "-m", "engine_agent.proxy", *named.split(), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


@asynccontextmanager
async def proxied(engine: Engine, *, priorities: bool) -> AsyncIterator[httpx.AsyncClient]:
    process = proxy_process(engine, priorities=priorities)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PROXY}", timeout=LIMIT_S) as client:
            await until(lambda: _answers(f"http://127.0.0.1:{PROXY}/healthz"))
            yield client
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.TransportError:
        return False


async def until(condition: Callable[[], bool]) -> float:
    """Seconds until `condition` holds."""
    began = perf_counter()
    while not await asyncio.to_thread(condition):
        if perf_counter() - began > LIMIT_S:
            raise SystemExit(f"not within {LIMIT_S:g} s")
        await asyncio.sleep(0.005)
    return perf_counter() - began


def running(engine: Engine) -> int:
    page = httpx.get(f"{engine.url}/metrics", timeout=5).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return int(sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(names)))


async def first_event(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> float:
    """Seconds to the first token; the stream is read to its end."""
    began, first = perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        async for _ in answer.aiter_raw():
            first = first or perf_counter() - began
    return first


async def leave(engine: Engine, client: httpx.AsyncClient) -> float:
    async with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        async for _ in answer.aiter_raw():
            break
    return await until(lambda: running(engine) == 0)


async def be_late(engine: Engine, client: httpx.AsyncClient) -> tuple[float, float]:
    """Seconds until the stream ended with an error event, and from then until the engine was idle."""
    began = perf_counter()
    headers = {"X-Switchyard-Deadline-Ms": "1000"}
    answer = await client.post("/v1/completions", json=ENDLESS, headers=headers)
    ended = perf_counter() - began
    if b'"deadline_exceeded"' not in answer.content:
        raise SystemExit(f"no deadline event: {answer.content[-300:]!r}")
    return ended, await until(lambda: running(engine) == 0)


async def usage(client: httpx.AsyncClient) -> str:
    whole = (await client.post("/v1/completions", json=SHORT)).json()["usage"]
    streamed = await client.post(
        "/v1/completions", json={**SHORT, "stream": True}, headers={"X-Switchyard-Tenant": "a"}
    )
    if b'"usage"' in streamed.content.replace(b'"usage":null', b""):
        raise SystemExit("a client that did not ask was shown the usage")
    load = (await client.get(f"http://127.0.0.1:{ADMIN}/status")).json()["load"]["tenants"]["a"]
    counted = (load["prompt_tokens_total"], load["completion_tokens_total"])
    said = (whole["prompt_tokens"], whole["completion_tokens"])
    return f"stream without asking: hidden, counted {counted}; the same question whole: {said}"


async def overtake(client: httpx.AsyncClient) -> tuple[float, float]:
    """Time to first token of a real-time request behind eight batch requests, and the median of those."""
    body = {**SHORT, "stream": True, "max_tokens": 64}
    batch = [asyncio.create_task(first_event(client, body, **{"X-Switchyard-Class": "batch"})) for _ in range(8)]
    await asyncio.sleep(0.2)
    urgent = await first_event(client, body)
    return urgent, statistics.median(await asyncio.gather(*batch))


def milliseconds(values: list[float]) -> str:
    return f"median {statistics.median(values) * 1000:.0f} ms, most {max(values) * 1000:.0f} ms"


async def measure(rounds: int) -> None:
    engine = Engine(0, 1, PRIORITY_ARGS, {})
    try:
        engine.wait_until_up()
        lines = [f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {rounds} rounds"]
        async with proxied(engine, priorities=True) as client:
            lines.append(await usage(client))
            gone = [await leave(engine, client) for _ in range(rounds)]
            lines.append(f"client left -> engine idle: {milliseconds(gone)}")
            late = [await be_late(engine, client) for _ in range(rounds)]
            lines.append(f"deadline of 1000 ms -> error event: {milliseconds([ended for ended, _ in late])}")
            lines.append(f"error event -> engine idle: {milliseconds([idle for _, idle in late])}")
        for priorities in (False, True):
            async with proxied(engine, priorities=priorities) as client:
                ttft = [await overtake(client) for _ in range(rounds)]
            told = "told" if priorities else "not told"
            urgent, batch = [one for one, _ in ttft], [each for _, each in ttft]
            lines.append(f"priorities {told}: real-time {milliseconds(urgent)}; batch {milliseconds(batch)}")
        sys.stdout.write(json.dumps(lines, indent=1) + "\n")
    finally:
        engine.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
