"""Streams broken by changes of an ingress, and recovery time of a killed HAProxy.

Cells, clients and the ingress (the agent's own loop around the real HAProxy) are three processes. Streams arrive at a
fixed rate by a Poisson process; a stream is whole if all of its tokens and its end arrived, and refused if its answer
was an error from its first byte on, which happens where the machine is too slow for the rate. Meanwhile cells are
added, removed, drained, undrained and limited through routing tables, each change waited for; then pools come and go,
which is a reload. Last, without streams, HAProxy's master is killed with SIGKILL and requests are tried until one is
answered.

    python -m bench ingress_changes [--rate 300] [--changes 100] [--reloads 10] [--kills 10] [--base-port 23100]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from time import perf_counter
from typing import cast

import uvloop

from engine_agent.ingress.agent import IngressAgent
from engine_agent.ingress.haproxy import find_binary
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.ingress_messages import (
    Affinity,
    CellEndpoint,
    IngressChanges,
    IngressReport,
    Pool,
    RoutingTable,
)

REGION = "bench"
CELLS = 12
TOKENS = 20
TOKEN_S = 0.025
"""40 tokens a second, half a second a stream."""
SLOTS = 64
PATIENCE_S = 20.0
WARM_UP_S = 2.0
BODY = json.dumps({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "why? " * 100}]}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":" token"},"index":0}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


# --- cells ---


class Cell(asyncio.Protocol):
    """One connection to a cell: health at once, everything else a stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            self._seen = b""
            self._transport.write(HEALTHY)
        elif len(body) >= len(BODY):
            self._seen = b""
            self._send(HEAD, TOKENS)

    def _send(self, before: bytes, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(before + chunk(DONE) + b"0\r\n\r\n")
            return
        self._transport.write(before + chunk(EVENT))
        asyncio.get_running_loop().call_later(TOKEN_S, self._send, b"", left - 1)


class AgentCheck(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"up 100%\n")
        transport.close()


async def serve(base_port: int) -> None:
    loop = asyncio.get_running_loop()
    for number in range(CELLS):
        await loop.create_server(Cell, "127.0.0.1", base_port + 2 * number, backlog=1024)
        await loop.create_server(AgentCheck, "127.0.0.1", base_port + 2 * number + 1, backlog=1024)
    await asyncio.Event().wait()


# --- clients ---


async def one_stream(port: int, outcomes: Counter[str], ttft_ms: list[float]) -> None:
    began, body = perf_counter(), b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            body = await reader.readuntil(b"[DONE]") if await _begins(reader, began, ttft_ms) else b""
            writer.close()
    except (OSError, EOFError, TimeoutError) as error:
        outcomes[f"broken: {type(error).__name__}"] += 1
        return
    outcomes["whole" if body.count(b" token") == TOKENS else "refused"] += 1


async def _begins(reader: asyncio.StreamReader, began: float, ttft_ms: list[float]) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    ttft_ms.append((perf_counter() - began) * 1000)
    return head.startswith(b"HTTP/1.1 200")


async def stream_steadily(port: int, rate: float) -> None:
    """Until standard input ends; then say how it went."""
    outcomes: Counter[str] = Counter()
    ttft_ms: list[float] = []
    loop = asyncio.get_running_loop()
    stop = loop.run_in_executor(None, sys.stdin.read)
    next_s = loop.time()
    async with asyncio.TaskGroup() as group:
        while not stop.done():
            group.create_task(one_stream(port, outcomes, ttft_ms))
            next_s += random.expovariate(rate)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
    sys.stdout.write(json.dumps({"outcomes": outcomes, "ttft_ms": sorted(ttft_ms)}))


# --- the ingress and what is done to it ---


class Bench:
    """One ingress, the table that it has, and its last report."""

    def __init__(self, home: Path, base_port: int) -> None:
        self.base_port = base_port
        self.port = base_port - 1
        self.ingress = IngressAgent(IngressSettings("i-bench", REGION, home, port=self.port), find_binary())
        self.cells = dict.fromkeys(range(CELLS // 2), False)
        self.limits: dict[int, int] = {}
        self.extra_pool = False
        self.revision = 0
        self.report: IngressReport | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Bench"]:
        task = asyncio.create_task(self.ingress.run(self._note))
        try:
            await self.route()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.ingress.stop(grace_s=0.0)

    def _note(self, report: IngressReport) -> None:
        self.report = report

    @property
    def changes(self) -> IngressChanges:
        return self.report.changes if self.report else IngressChanges()

    async def route(self) -> float:
        """Have the table in force; the seconds that took."""
        self.revision += 1
        cells = tuple(self._endpoint(number, drain) for number, drain in sorted(self.cells.items()))
        pools = [Pool("demo", ("demo",), "realtime", cells, (), {}, Affinity())]
        if self.extra_pool:
            pools.append(Pool("extra", ("extra",), "batch", (), (), {}))
        began = perf_counter()
        self.ingress.receive(RoutingTable(self.revision, REGION, tuple(pools)))
        wanted = {f"c-{number}" for number, drain in self.cells.items() if not drain}
        async with asyncio.timeout(PATIENCE_S):
            while not self._is_in_force(wanted):  # noqa: ASYNC110 - reports come by a callback
                await asyncio.sleep(0.005)
        return perf_counter() - began

    def _is_in_force(self, wanted: Iterable[str]) -> bool:
        seen = self.report.observed if self.report else None
        return bool(seen and seen.revision == self.revision and all(seen.cells.get(cell) == "up" for cell in wanted))

    def _endpoint(self, number: int, drain: bool) -> CellEndpoint:
        port = self.base_port + 2 * number
        return CellEndpoint(f"c-{number}", 1, "127.0.0.1", port, self.limits.get(number, SLOTS), drain=drain)

    def change(self) -> str:
        """Change one thing about one cell; at least three serve."""
        away = [number for number in range(CELLS) if number not in self.cells]
        serving = [number for number, drain in self.cells.items() if not drain]
        draining = [number for number, drain in self.cells.items() if drain]
        possible = {"limit": serving, "add": away, "undrain": draining}
        if len(serving) > 3:
            possible |= {"remove": serving, "drain": serving}
        kind = random.choice([name for name, cells in possible.items() if cells])
        number = random.choice(possible[kind])
        if kind == "limit":
            self.limits[number] = random.choice([SLOTS - 1, SLOTS, SLOTS + 1])
        elif kind == "remove":
            del self.cells[number]
        else:
            self.cells[number] = kind == "drain"
        return kind


async def killed(bench: Bench) -> float:
    """Seconds from a SIGKILL of the master to the first answer."""
    pid = bench.ingress.serving.process.pid
    if pid is None:
        raise RuntimeError("HAProxy does not run")
    os.kill(pid, signal.SIGKILL)
    began = perf_counter()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            outcomes: Counter[str] = Counter()
            await one_stream(bench.port, outcomes, ttft := [])
            if outcomes["whole"]:
                return perf_counter() - began - (TOKENS * TOKEN_S if ttft else 0.0)
            await asyncio.sleep(0.005)


async def under_streams(bench: Bench, rate: float, work: str, count: int) -> tuple[str, str]:
    """Do some work `count` times while streams flow. A row of the report, and what the work was."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", str(bench.port), "--rate", str(rate),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    await asyncio.sleep(WARM_UP_S)
    before, took_s, kinds = bench.changes, [], Counter[str]()
    for _ in range(count):
        if work == "changes":
            kinds[bench.change()] += 1
        else:
            bench.extra_pool = not bench.extra_pool
        took_s.append(await bench.route())
    await asyncio.sleep(1.0)
    output, _ = await client.communicate(b"")
    result = json.loads(output)
    outcomes, ttft_ms = result["outcomes"], result["ttft_ms"]
    refused = outcomes.get("refused", 0)
    broken = sum(outcomes.values()) - outcomes.get("whole", 0) - refused
    after = bench.changes
    row = (
        f"| {count} {work} | {sum(outcomes.values()):,} | **{broken}** | {refused} | {statistics.median(took_s):.2f} / "
        f"{max(took_s):.2f} | {ttft_ms[len(ttft_ms) // 2]:.1f} / {ttft_ms[int(len(ttft_ms) * 0.99)]:.1f} | "
        f"{after.applied_total - before.applied_total} | {after.reloads_total - before.reloads_total} |"
    )
    failures = {outcome: number for outcome, number in outcomes.items() if outcome != "whole"}
    return row, f"{work}: {dict(kinds) or count}; not whole: {failures or 'none'}"


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="ingress-") as folder:
        async with Bench(Path(folder) / "home", options.base_port).running() as bench:
            rows = [
                await under_streams(bench, options.rate, "changes", options.changes),
                await under_streams(bench, options.rate, "reloads", options.reloads),
            ]
            kills = []
            for _ in range(options.kills):
                kills.append(await killed(bench))
                await bench.route()
                await asyncio.sleep(5.5)  # a HAProxy that lived for less counts as a failed start
    print(
        f"{os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f}; {options.rate:g} streams/s of {TOKENS} tokens, {TOKENS * TOKEN_S:g} s each\n\n"
        "| under streams | streams | broken | refused | until in force, s, p50 / max | to first byte, ms, p50 / p99 "
        "| steps in place | reloads |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    print("\n".join(row for row, _ in rows) + "\n")
    print("\n".join(f"- {what}" for _, what in rows))
    print(
        f"- {len(kills)} kills of HAProxy, until the next answer: median {statistics.median(kills):.2f} s, "
        f"longest {max(kills):.2f} s"
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--base-port", type=int, default=23100)
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cells:
        uvloop.run(serve(options.base_port))
    elif options.clients:
        uvloop.run(stream_steadily(options.clients, options.rate))
    else:
        cells = subprocess.Popen([sys.executable, __file__, "--cells", "--base-port", str(options.base_port)])
        try:
            asyncio.run(measure(options))
        finally:
            cells.kill()
            cells.wait()
