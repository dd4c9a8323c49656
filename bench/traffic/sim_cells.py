"""Real `sim` cells with their cell proxies, for the runs that confirm what the simulation says. It measures nothing."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, cast

from bench.traffic import contenders
from bench.traffic.arrivals import Arrival
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.ingress_messages import CellEndpoint

PORTS_PER_CELL = 10
LONGEST_TOKENS = 8192


@contextlib.contextmanager
def sim_cells(
    folder: Path,
    base: int,
    parameters: ModelParameters,
    slow_factors: Sequence[float],
) -> Iterator[list[CellEndpoint]]:
    """A cell for each factor, so many times as slow as `parameters` say, all up and answering."""
    with ExitStack() as stack:
        cells = [
            stack.enter_context(_cell(folder, number, base + PORTS_PER_CELL * number, parameters, factor))
            for number, factor in enumerate(slow_factors)
        ]
        for cell in cells:
            contenders.wait_until_it_answers(cell.port)
        yield cells


@dataclass(frozen=True)
class Ports:
    proxy: int
    proxy_admin: int
    engine: int
    engine_admin: int


@contextlib.contextmanager
def _cell(
    folder: Path,
    number: int,
    base: int,
    parameters: ModelParameters,
    factor: float,
) -> Iterator[CellEndpoint]:
    ports = Ports(*range(base, base + 4))
    name = ("--node-id", f"n-{number:08x}", "--cell", f"c-{number}", "--generation", "1")
    engine = engine_command(name, ports, parameters, factor)
    proxy = proxy_command(name, ports, parameters.max_num_seqs)
    with (
        contenders.spawned(engine, folder / f"engine-{number}.log"),
        contenders.spawned(proxy, folder / f"proxy-{number}.log"),
    ):
        yield CellEndpoint(f"c-{number}", 1, "127.0.0.1", ports.proxy, parameters.max_num_seqs)


def engine_command(name: Sequence[str], ports: Ports, parameters: ModelParameters, factor: float) -> tuple[str, ...]:
    model = ((f"--{each.name.replace('_', '-')}", str(getattr(parameters, each.name))) for each in fields(parameters))
    return (
        *(sys.executable, "-m", "engine_agent.engines.sim", *name),
        *("--rank", "0", "--role", "leader", "--followers", "0", "--leader", "127.0.0.1:1"),
        *("--port", str(ports.engine), "--admin-port", str(ports.engine_admin)),
        *("--served-model", contenders.MODEL, "--max-model-len", str(LONGEST_TOKENS), "--load-time-s", "0"),
        *chain.from_iterable(model),
        *(("--fault", json.dumps({"kind": "slow", "factor": factor})) if factor > 1 else ()),
    )


def proxy_command(name: Sequence[str], ports: Ports, max_concurrency: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "engine_agent.cell_proxy", *name),
        *("--port", str(ports.proxy), "--admin-port", str(ports.proxy_admin)),
        *("--engine", f"http://127.0.0.1:{ports.engine}"),
        *("--model", contenders.MODEL, "--max-concurrency", str(max_concurrency), "--no-access-log"),
        *("--priorities", "--orders-classes"),  # as a node starts it for this engine
    )


LIMIT_S = 300.0


@dataclass
class Seen:
    """One try as its client saw it; times from `monotonic`, 0: it did not come so far. `status` 0: no answer."""

    began_s: float
    status: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0
    cell: str = ""
    retry_after_s: float = 0.0
    whole: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s


class _Exchange(asyncio.Protocol):
    def __init__(self, seen: Seen, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self._seen, self._request = seen, request
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._seen.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(head.decode("latin-1").split("\r\n"))
        if data and not self._seen.first_s:
            self._seen.first_s = monotonic()
            self.first.set_result(None)
        self._tail = (self._tail + data)[-64:]

    def _read_head(self, lines: list[str]) -> None:
        self._seen.status = int(lines[0].split(" ")[1])
        named = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines[1:])}
        self._seen.cell = named.get("x-switchyard-cell", "")
        self._seen.retry_after_s = float(named.get("retry-after", 0))

    def connection_lost(self, _error: Exception | None) -> None:
        self._seen.ended_s = monotonic()
        self._seen.whole = self._seen.status == 200 and b"data: [DONE]" in self._tail
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)


async def ask(port: int, body: dict[str, Any], patience_s: float = LIMIT_S) -> Seen:
    """One try; leaves when no token came within `patience_s`, or the answer did not end within `LIMIT_S`."""
    text = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    seen = Seen(monotonic())
    loop = asyncio.get_running_loop()
    request = f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
    try:
        transport, exchange = await loop.create_connection(lambda: _Exchange(seen, request), "127.0.0.1", port)
    except OSError:
        seen.ended_s = monotonic()
        return seen
    try:
        async with asyncio.timeout(patience_s):
            await exchange.first
        async with asyncio.timeout(LIMIT_S):
            await exchange.done
    except TimeoutError:
        transport.abort()
        await exchange.done
    return seen


async def play(arrivals: Sequence[Arrival], each: Callable[[Arrival], Awaitable[None]]) -> None:
    """Start `each` at its time, whatever became of the earlier ones; return when all have ended."""
    began_s = monotonic()
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - monotonic()))
            group.create_task(_run(each, arrival))


async def _run(each: Callable[[Arrival], Awaitable[None]], arrival: Arrival) -> None:
    await each(arrival)


def body_of(arrival: Arrival, model: str, block_tokens: int, word: str = ".") -> dict[str, Any]:
    """A chat whose prompt has the arrival's length and begins with its blocks: one word is one token of a sim cell.

    Equal blocks give equal text, a name and `block_tokens` - 1 times the `word`. The first block is the system's
    message and the second one the user's first, as in the conversations that the traces recorded."""
    texts = [f"b{block}" + f" {word}" * (block_tokens - 1) for block in arrival.blocks]
    rest = arrival.prompt_tokens - block_tokens * len(texts)
    if rest > 0:
        texts.append(f"{arrival.key}" + f" {word}" * (rest - 1))
    messages = [
        {"role": "system" if place == 0 and len(texts) > 1 else "user", "content": text}
        for place, text in enumerate(texts[:2])
    ]
    if texts[2:]:
        messages += [{"role": "user", "content": " ".join(texts[2:])}]
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
    }
