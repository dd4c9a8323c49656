"""Batch work beside real-time requests through the real cell proxy before a real engine, `sim` or vLLM: real time, so
the figures hold on a machine that does nothing else. One cell after the other, each started anew."""

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import httpx

from bench import executor_cell
from bench.guest.world import CELL, Load, Measured, realtime_of
from bench.traffic import contenders
from bench.traffic.arrivals import Arrival
from bench.traffic.sim_cells import sim_cells

PORT = 17600
BUSY_PAUSE_S = 0.5
"""Before a batch line that was refused is sent again."""
LIMITS = httpx.Limits(max_connections=None)


@dataclass(frozen=True)
class Scale:
    """What one cell of this engine can do: slots, real-time requests a second, by how much lengths of the trace are
    divided, prompt and answer of a batch line in tokens, and batch prompt tokens in a step."""

    slots: int
    rate: float
    divided_by: int
    prompt: int
    answer: int
    tokens: int


SCALES = {"sim": Scale(64, 1.2, 1, 1500, 200, 256), "vllm": Scale(16, 0.4, 16, 150, 24, 32)}


@dataclass
class Rule:
    """How batch lines are sent: as which class, by so many clients at once, with the order of classes in the engine."""

    serving_class: str
    at_once: int
    has_order: bool


def rules_of(scale: Scale) -> dict[str, Rule]:
    return {
        "alone": Rule("batch", 0, has_order=True),
        "no rule": Rule("realtime", scale.slots, has_order=False),
        "guest": Rule("batch", scale.slots, has_order=True),
    }


@contextmanager
def cell(kind: str, scale: Scale, rule: Rule) -> Iterator[tuple[str, str]]:
    """A cell with its proxy: where it takes requests, and the model's name."""
    tokens = scale.tokens if rule.has_order else 0
    known = ("--priorities", *(("--orders-classes",) if rule.has_order else ()))
    with tempfile.TemporaryDirectory() as folder:
        if kind == "sim":
            parameters = replace(CELL, batch_prompt_tokens=tokens)
            with sim_cells(Path(folder), PORT, parameters, [1.0], proxy_arguments=known) as cells:
                yield f"http://127.0.0.1:{cells[0].endpoint.port}", contenders.MODEL
            return
        order = ("--scheduling-policy", "priority", "--batch-prompt-tokens", str(tokens))
        with executor_cell.engine(0, 1, *executor_cell.ARGS, *order) as engine:
            words = (
                *(sys.executable, "-m", "engine_agent.proxy", "--node-id", "n-0", "--cell", "c-0", "--generation", "1"),
                *("--port", str(PORT), "--admin-port", str(PORT + 1), "--engine", engine.url, *known),
                *("--model", "m", "--max-concurrency", str(scale.slots), "--no-access-log"),
            )
            with contenders.spawned(words, Path(folder) / "proxy.log"):
                _wait_for(f"http://127.0.0.1:{PORT}/healthz")
                yield f"http://127.0.0.1:{PORT}", "m"


def _wait_for(url: str) -> None:
    transport = httpx.HTTPTransport(retries=60)  # each waits longer than the one before
    with httpx.Client(transport=transport, timeout=60) as client:
        client.get(url)


async def measured(url: str, model: str, scale: Scale, rule: Rule, load: Load, seed: int) -> tuple[Measured, int]:
    """What came of one run, and how many real-time requests were refused."""
    chance = random.Random(seed)
    coming = [
        replace(
            each,
            prompt_tokens=max(1, each.prompt_tokens // scale.divided_by),
            output_tokens=max(2, each.output_tokens // scale.divided_by),
        )
        for each in realtime_of(load, chance)
    ]
    found, refused, began = Measured(seconds=load.measured_s), 0, monotonic()

    async def one(client: httpx.AsyncClient, arrival: Arrival) -> None:
        nonlocal refused
        await asyncio.sleep(max(0.0, began + arrival.at_s - monotonic()))
        sent, last = monotonic(), 0.0
        async for at in _tokens(client, url, model, arrival):
            if arrival.at_s >= load.warm_up_s:
                (found.itl if last else found.ttft).add(at - (last or sent))
            last = at
        refused += not last

    async def line(client: httpx.AsyncClient) -> None:
        await asyncio.sleep(max(0.0, began + load.batch_from_s - monotonic()))
        while True:
            prompt, answer = (round(mean * chance.uniform(0.5, 1.5)) for mean in (scale.prompt, scale.answer))
            headers = {"X-Switchyard-Class": rule.serving_class}
            answered = await client.post(f"{url}/v1/completions", json=_body(model, prompt, answer), headers=headers)
            if answered.status_code != 200:
                await asyncio.sleep(BUSY_PAUSE_S)
            elif monotonic() - began >= load.warm_up_s:
                found.tokens += answered.json()["usage"]["completion_tokens"]
                found.lines += 1

    async with httpx.AsyncClient(limits=LIMITS, timeout=600) as client:
        lines = [asyncio.create_task(line(client)) for _ in range(rule.at_once)]
        requests = [asyncio.create_task(one(client, each)) for each in coming]
        await asyncio.sleep(load.ends_s)
        for task in (*lines, *requests):
            task.cancel()
        await asyncio.gather(*lines, *requests, return_exceptions=True)
    return found, refused


def _body(model: str, prompt: int, answer: int) -> dict[str, object]:
    return {"model": model, "prompt": "word " * prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0}


async def _tokens(client: httpx.AsyncClient, url: str, model: str, arrival: Arrival) -> AsyncIterator[float]:
    """When each token came; none where the request was refused."""
    body = {**_body(model, arrival.prompt_tokens, arrival.output_tokens), "stream": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            sys.stderr.write(f"refused: {(await answer.aread())[:200]!r}\n")
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                yield monotonic()
