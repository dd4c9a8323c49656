"""Streams while cells are killed: cut, lost or repeated tokens, pauses, and the cost of the relay.

Greedy streams run over `sim` cells, HAProxy and the relays. Every few seconds one cell's engine gets SIGKILL and is
started again, as its agent does. Each answer is compared with that of an undisturbed run, and the tokens that the cells
counted with those that the clients got.

    .venv/bin/python -m bench continuation [--streams 1000] [--every 10] [--dialect chat …] [--without]
"""

import argparse
import asyncio
import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil
import uvloop

from bench import RESULTS, cpu_s, note, percentile
from bench.traffic import contenders
from bench.traffic.contenders import MODEL
from bench.traffic.sim_cells import Ports, engine_command, proxy_command
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.ingress.relay_processes import read_counts
from engine_agent.protocol.ingress_messages import CellEndpoint

BASE_PORT = 28700
CELLS, PLACES, TOKENS = 3, 256, 200
CELL = ModelParameters(decode_step_ms=25, decode_step_per_seq_ms=0, max_num_seqs=PLACES, prefill_tokens_per_s=1e6)
VERSION = "1"
_PROMPT = "Tell me about number"
_TIMES = re.compile(r'"(?:created|created_at)":\d+|"(?:id|item_id)":"[^"]*"')


@dataclass(frozen=True)
class Dialect:
    path: str
    body: dict[str, Any]
    member: str
    """Of the body, for the prompt."""

    def request(self, number: int, *, stream: bool = True) -> dict[str, Any]:
        text = f"{_PROMPT} {number}"
        prompt: Any = [{"role": "user", "content": text}] if self.member == "messages" else text
        return {"model": MODEL, "stream": stream, self.member: prompt, "ignore_eos": True, **self.body}


_LIMITED = {"max_tokens": TOKENS, "temperature": 0}
_COUNTED = {**_LIMITED, "stream_options": {"include_usage": True}}
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", _COUNTED, "messages"),
    "completions": Dialect("/v1/completions", _COUNTED, "prompt"),
    "responses": Dialect("/v1/responses", {"max_output_tokens": TOKENS, "temperature": 0}, "input"),
    "messages": Dialect("/v1/messages", {"max_tokens": TOKENS, "temperature": 0}, "messages"),
}


@dataclass
class Seen:
    """One stream as its client saw it."""

    text: str = ""
    usage: tuple[int, int] = (0, 0)
    ended: bool = False
    error: str = ""
    longest_pause_s: float = 0.0
    shape: list[str] = field(default_factory=list)
    """Its events without ids and times."""


class KillableCell:
    """A `sim` cell with its proxy. `kill` ends its engine, which is started again."""

    def __init__(self, folder: Path, number: int, base: int, parameters: ModelParameters) -> None:
        self.ports = Ports(*range(base, base + 4))
        self.name = f"c-{number}"
        self._log = folder / f"engine-{number}.log"
        words = ("--node-id", f"n-{number:08x}", "--cell", self.name, "--generation", "1")
        self._engine = engine_command(words, self.ports, parameters, 1.0)
        self._proxy = (*proxy_command(words, self.ports, parameters.max_num_seqs), "--replays")
        self._proxy_log = folder / f"proxy-{number}.log"
        self._stack = ExitStack()
        self._running = ExitStack()

    @contextlib.contextmanager
    def running(self) -> Iterator[CellEndpoint]:
        with self._stack:
            self._start()
            self._stack.callback(self._running.close)
            self.proxy = self._stack.enter_context(contenders.spawned(self._proxy, self._proxy_log))
            yield CellEndpoint(
                self.name, 1, "127.0.0.1", self.ports.proxy, CELL.max_num_seqs, node="n-0", version=VERSION
            )

    def _start(self) -> None:
        self.engine = self._running.enter_context(contenders.spawned(self._engine, self._log))

    def kill(self) -> None:
        self.engine.send_signal(signal.SIGKILL)
        self._running.close()
        self._start()

    async def holds(self, http: httpx.AsyncClient, enough: Callable[[int], bool]) -> None:
        """Waits until it has so many requests."""
        async with asyncio.timeout(60):
            while not enough((await self.ask(http, "/status"))["in_flight"]):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)

    async def ask(self, http: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.ports.proxy_admin}{path}"
        answer = await (http.get(url) if body is None else http.post(url, json=body))
        return answer.json()


async def read_stream(http: httpx.AsyncClient, port: int, name: str, number: int) -> Seen:
    """One stream, read to its end."""
    dialect, seen = DIALECTS[name], Seen()
    last = monotonic()
    try:
        async with http.stream(
            "POST", f"http://127.0.0.1:{port}{dialect.path}", json=dialect.request(number)
        ) as answer:
            if answer.status_code != 200:
                seen.error = f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                now, last = last, monotonic()
                if not line.startswith("data: "):
                    seen.error = seen.error or ("a mark reached the client" if line.startswith(":") else "")
                    continue
                seen.longest_pause_s = max(seen.longest_pause_s, last - now) if seen.shape else 0.0
                _note(seen, name, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        seen.error = seen.error or type(error).__name__
    return seen


def _note(seen: Seen, name: str, data: str) -> None:
    if data == "[DONE]":
        seen.ended = True
        return
    seen.shape.append(_TIMES.sub("", data))
    body = json.loads(data)
    if body.get("error"):
        seen.error = str(body["error"].get("code") or body["error"].get("type"))
    kind = body.get("type", "")
    if name in ("chat", "completions"):
        for choice in body.get("choices", ()):
            seen.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if body.get("usage"):
            seen.usage = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    elif name == "responses":
        seen.text += body["delta"] if kind == "response.output_text.delta" else ""
        if kind in ("response.completed", "response.incomplete"):
            seen.ended = True
            seen.usage = body["response"]["usage"]["input_tokens"], body["response"]["usage"]["output_tokens"]
    else:
        seen.text += body["delta"].get("text", "") if kind == "content_block_delta" else ""
        seen.ended = seen.ended or kind == "message_stop"
        if kind == "message_delta":
            seen.usage = body["usage"]["input_tokens"], body["usage"]["output_tokens"]


@contextlib.contextmanager
def fleet(
    folder: Path, *, cells: int = CELLS, continues: bool = True, step_ms: float = CELL.decode_step_ms
) -> Iterator["Fleet"]:
    """Cells and an ingress; `continues`: streams continue; `step_ms`: between two tokens."""
    base, parameters = BASE_PORT, replace(CELL, decode_step_ms=step_ms)
    with ExitStack() as stack:
        all_cells = [KillableCell(folder, number, base + 20 + 10 * number, parameters) for number in range(cells)]
        endpoints = [stack.enter_context(cell.running()) for cell in all_cells]
        for endpoint in endpoints:
            contenders.wait_until_it_answers(endpoint.port)
        home = folder / "ingress"
        agent = stack.enter_context(contenders.ingress(home, base, endpoints, continues=continues))
        contenders.wait_until_it_answers(base)
        yield Fleet(base, all_cells, home, agent)


@dataclass
class Fleet:
    port: int
    cells: list[KillableCell]
    home: Path
    agent: psutil.Process

    def relays(self) -> list[psutil.Process]:
        place = str(self.home.resolve() / "relay")
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if "engine_agent.relay" in (each.info["cmdline"] or ()) and place in " ".join(each.info["cmdline"])
        ]

    async def relay_counts(self) -> Counter[str]:
        """Of all relays, by name and reason."""
        totals: Counter[str] = Counter()
        for socket in sorted((self.home / "relay").glob("[0-9].sock")):
            counts = await read_counts(socket)
            totals.update({"requests": counts.requests, "open": counts.open})
            for pool in counts.pools.values():
                for name, by_reason in (("continued", pool.continued_total), ("cut", pool.cut_total)):
                    totals.update({f"{name}:{reason}": count for reason, count in by_reason.items()})
        return totals

    async def counted(self) -> tuple[int, int]:
        """Prompt and completion tokens that the cells counted, once all requests are settled."""
        async with httpx.AsyncClient() as http, asyncio.timeout(60):
            while True:
                loads = [(await cell.ask(http, "/status"))["load"] for cell in self.cells]
                rows = [row for load in loads for row in load["usage"]]
                if not any(row.get("in_flight", 0) for row in rows):
                    prompts = sum(row.get("prompt_tokens_total", 0) for row in rows)
                    return prompts, sum(row.get("completion_tokens_total", 0) for row in rows)
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def killing(fleet: Fleet, every_s: float) -> AsyncIterator[list[str]]:
    """Kills the cells in turn, one every few seconds."""
    killed: list[str] = []

    async def kill() -> None:
        while True:
            for cell in fleet.cells:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(cell.kill)
                killed.append(cell.name)

    task = asyncio.create_task(kill())
    try:
        yield killed
    finally:
        task.cancel()
        await asyncio.wait([task])


async def measure(fleet: Fleet, name: str, streams: int, at_once: int, every_s: float) -> dict[str, Any]:
    """All streams of a dialect, undisturbed and then with kills."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        expected = [await read_stream(http, fleet.port, name, number) for number in range(8)]
        if any(seen.error or not seen.ended for seen in expected):
            raise SystemExit(f"undisturbed streams failed: {[(seen.error, len(seen.shape)) for seen in expected]}")
        before, counts, cpu = await fleet.counted(), await fleet.relay_counts(), cpu_s(fleet.relays())
        places = asyncio.Semaphore(at_once)

        async def one(number: int) -> tuple[int, Seen]:
            async with places:
                return number, await read_stream(http, fleet.port, name, number % len(expected))

        began = monotonic()
        async with killing(fleet, every_s) as killed:
            seen = await asyncio.gather(*(one(number) for number in range(streams)))
        took_s = monotonic() - began
    after = await fleet.counted()
    counts = (await fleet.relay_counts()) - counts
    wanted = [(expected[number % len(expected)], each) for number, each in seen]
    events = sum(len(each.shape) for _, each in seen)
    continued = sum(count for reason, count in counts.items() if reason.startswith("continued"))
    pauses = sorted((each.longest_pause_s for _, each in seen), reverse=True)[: max(1, continued)]
    used = [sum(each.usage[part] for _, each in seen if each.ended) for part in (0, 1)]
    return {
        "dialect": name,
        "streams": streams,
        "kills": len(killed),
        "continued": continued,
        "cut": sum(not each.ended or bool(each.error) for _, each in seen),
        "errors": dict(Counter(each.error for _, each in seen if each.error)),
        "texts_that_differ": sum(want.text != got.text for want, got in wanted),
        "events_that_differ": sum(want.shape != got.shape for want, got in wanted),
        "usages_that_differ": sum(want.usage != got.usage for want, got in wanted),
        "tokens_of_clients": used,
        "tokens_counted": [after[part] - before[part] for part in (0, 1)],
        "pause_p50_s": round(percentile(pauses, 0.5), 3),
        "pause_p99_s": round(percentile(pauses, 0.99), 3),
        "relay_cpu_us_per_event": round(1e6 * (cpu_s(fleet.relays()) - cpu) / max(1, events), 1),
        "counts": dict(counts),
        "seconds": round(took_s, 1),
    }


async def drain(fleet: Fleet, streams: int) -> dict[str, Any]:
    """Long streams at all cells, one of which then drains: how long until it is empty, and what its streams lose."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        expected = await read_stream(http, fleet.port, "chat", 0)
        tasks = [
            asyncio.create_task(read_stream(http, fleet.port, "chat", 0)) for _ in range(streams * len(fleet.cells))
        ]
        cell = fleet.cells[0]
        await cell.holds(http, lambda held: held >= streams * 0.8)
        began = monotonic()
        held = (await cell.ask(http, "/phase", {"phase": "drain"}))["in_flight"]
        await cell.holds(http, lambda held: held == 0)
        empty_s = monotonic() - began
        seen = await asyncio.gather(*tasks)
        await cell.ask(http, "/phase", {"phase": "serve"})
    return {
        "streams_of_the_cell": held,
        "empty_after_s": round(empty_s, 2),
        "cut": sum(not each.ended or bool(each.error) for each in seen),
        "texts_that_differ": sum(each.text != expected.text for each in seen),
        "pause_p99_s": round(percentile([each.longest_pause_s for each in seen], 0.99), 3),
        "counts": dict(await fleet.relay_counts()),
    }


async def cost(fleet: Fleet, rounds: int) -> dict[str, Any]:
    """CPU time of the relays per request and per event, from requests of one token and of many; and the memory that a
    stream takes while it runs."""
    limits = httpx.Limits(max_connections=None)
    per_request, per_event = [], []
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:

        async def run(streams: int, tokens: int) -> tuple[float, int]:
            before = cpu_s(fleet.relays())
            body = DIALECTS["chat"].request(0) | {"max_tokens": tokens}
            url = f"http://127.0.0.1:{fleet.port}/v1/chat/completions"
            answers = await asyncio.gather(*(http.post(url, json=body) for _ in range(streams)))
            return 1e6 * (cpu_s(fleet.relays()) - before), sum(each.text.count("data: ") for each in answers)

        for _ in range(rounds):
            short_us, few = await run(200, 1)
            long_us, many = await run(100, TOKENS)
            each = (long_us - short_us / 2) / (many - few / 2)
            per_event.append(round(each, 1))
            per_request.append(round((short_us - few * each) / 200, 1))
        before, held = sum(each.memory_info().rss for each in fleet.relays()), 300
        body = DIALECTS["chat"].request(0) | {"max_tokens": 1000}
        url = f"http://127.0.0.1:{fleet.port}/v1/chat/completions"
        tasks = [asyncio.create_task(http.post(url, json=body)) for _ in range(held)]
        await asyncio.sleep(10)
        open_now = (await fleet.relay_counts())["open"]
        grown = sum(each.memory_info().rss for each in fleet.relays()) - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {
        "cpu_us_per_request": spread(per_request),
        "cpu_us_per_event": spread(per_event),
        "kib_per_stream": round(grown / 1024 / max(1, open_now), 1),
        "streams_held": open_now,
    }


def spread(values: list[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{percentile(values, 0.5)} ({min(values)}-{max(values)})"


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="of each dialect")
    parser.add_argument("--at-once", type=int, default=60)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--dialect", action="append", choices=list(DIALECTS), help="default: all")
    parser.add_argument("--cost", type=int, default=0, metavar="ROUNDS", help="measure the relay instead")
    parser.add_argument("--drain", type=int, default=0, metavar="STREAMS", help="drain a cell with so many instead")
    parser.add_argument("--without", action="store_true", help="without continuation")
    options = parser.parse_args()
    step_ms = 100.0 if options.drain else CELL.decode_step_ms
    with fleet(RESULTS / "runs" / "continuation", continues=not options.without, step_ms=step_ms) as running:
        if options.drain:
            note("continuation", {"drain": options.drain, **uvloop.run(drain(running, options.drain))})
            return
        if options.cost:
            note("continuation", uvloop.run(cost(running, options.cost)))
            return
        for name in options.dialect or DIALECTS:
            row = uvloop.run(measure(running, name, options.streams, options.at_once, options.every))
            note("continuation", {"continuation": not options.without, **row})
