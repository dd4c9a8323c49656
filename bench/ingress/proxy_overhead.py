"""Latency and throughput that the cell proxy adds.

Time to the first token, delay of every later token at many streams, and requests/s.

An upstream that costs next to nothing runs in a process of its own and stamps each event with the moment it was sent.
Rounds through the proxy and rounds straight to the upstream alternate within one run, so both see the same machine.

    .venv/bin/python -m bench proxy_overhead [--streams 50] [--rounds 12] [--base-port 32100]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import cast

import uvloop

from bench.figures import percentile
from bench.places import ROOT

EVENTS = 25
EVENT_INTERVAL_S = 0.02
"""50 tokens a second and stream: a fast engine."""
STAGGER_S = 0.4
RATE_ROUND_S = 2.0
END = b"0\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"choices": [{"text": "x" * 100}], "usage": {"completion_tokens": 16}}).encode() + b"\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
PROMPT = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "why? " * 100}], "stream": True}
).encode()


def request(path: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json", f"content-length: {len(PROMPT)}")
    return "\r\n".join((*lines, "", "")).encode() + PROMPT


# --- upstream ---


class Upstream(asyncio.Protocol):
    """Answers by path, as soon as the whole request is there: `/v1/completions` with events, all else at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if not found or (b"content-length: %d" % len(PROMPT) in head and len(body) < len(PROMPT)):
            return
        self._seen = b""
        if b"/v1/completions" in head:
            self._send_event(STREAM_HEAD, EVENTS)
        else:
            self._transport.write(WHOLE)

    def _send_event(self, before: bytes, left: int) -> None:
        if self._transport.is_closing():
            return
        event = b'data: {"at":%.7f,"choices":[{"delta":{"content":" token"},"index":0}]}\n\n' % perf_counter()
        last = left == 1
        self._transport.write(before + b"%x\r\n%b\r\n" % (len(event), event) + (END if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(EVENT_INTERVAL_S, self._send_event, b"", left - 1)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# --- client ---


@dataclass
class Samples:
    """What the rounds of one path gave."""

    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One keep-alive connection; `end` is how an answer ends."""

    def __init__(self, end: bytes, samples: Samples | None = None) -> None:
        self._end = end
        self._samples = samples

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, raw: bytes) -> "asyncio.Future[None]":
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked_at = perf_counter()
        self._first = True
        self._transport.write(raw)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self._samples is not None:
            if self._first:
                self._samples.ttft_ms.append((now - self._asked_at) * 1000)
                self._first = False
            else:
                self._note_delays(data, now, self._samples)
        if data.endswith(self._end) and not self._done.done():
            self._done.set_result(None)

    def _note_delays(self, data: bytes, now: float, samples: Samples) -> None:
        for part in data.split(b'{"at":')[1:]:
            samples.token_ms.append((now - float(part.split(b",", 1)[0])) * 1000)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed"))

    def close(self) -> None:
        self._transport.close()


async def connect(port: int, count: int, end: bytes, samples: Samples | None = None) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(lambda: Client(end, samples), "127.0.0.1", port))[1] for _ in range(count)]


async def stream_round(port: int, streams: int, samples: Samples) -> None:
    """Every client streams twice, started at random moments."""
    clients = await connect(port, streams, END, samples)

    async def one(client: Client) -> None:
        for _ in range(2):
            await asyncio.sleep(random.uniform(0, STAGGER_S))
            await client.ask(request("/v1/completions"))

    await asyncio.gather(*(one(client) for client in clients))
    for client in clients:
        client.close()


async def rate_round(port: int, clients_wanted: int, samples: Samples) -> None:
    """As many short requests as go through, closed loop."""
    clients = await connect(port, clients_wanted, b"}\n")
    raw, count = request("/v1/chat/completions"), 0
    ends_at = perf_counter() + RATE_ROUND_S

    async def one(client: Client) -> None:
        nonlocal count
        while perf_counter() < ends_at:
            await client.ask(raw)
            count += 1

    began = perf_counter()
    await asyncio.gather(*(one(client) for client in clients))
    samples.requests_per_s.append(count / (perf_counter() - began))
    for client in clients:
        client.close()


# --- the run ---


def row(name: str, direct: list[float], proxied: list[float]) -> str:
    cells = []
    for q in (0.5, 0.99):
        before, after = percentile(direct, q), percentile(proxied, q)
        cells += [f"{before:.3f}", f"{after:.3f}", f"**{after - before:+.3f}**"]
    return f"| {name} | {len(proxied)} | " + " | ".join(cells) + " |\n"


def report(streams: int, direct: Samples, proxied: Samples, cpu_s_per_1k: float, resident_mib: float) -> str:
    straight, through = statistics.median(direct.requests_per_s), statistics.median(proxied.requests_per_s)
    return (
        f"{os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}, {streams} concurrent streams of {EVENTS} events "
        f"every {EVENT_INTERVAL_S * 1000:.0f} ms; milliseconds\n\n"
        "| | n | direct p50 | proxy p50 | added p50 | direct p99 | proxy p99 | added p99 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        + row("time to first token", direct.ttft_ms, proxied.ttft_ms)
        + row("delay of a later token", direct.token_ms, proxied.token_ms)
        + f"\nRequests/s, median of {len(direct.requests_per_s)} rounds, {streams} connections: direct "
        f"{straight:,.0f}, proxy {through:,.0f} ({through / straight:.2f} of direct). "
        f"Proxy CPU {cpu_s_per_1k:.3f} s per 1,000 requests, {resident_mib:.0f} MiB resident.\n"
    )


async def measure(streams: int, rounds: int, upstream: int, proxy: int, proxy_pid: int) -> str:
    direct, proxied = Samples(), Samples()
    paths = [(upstream, direct), (proxy, proxied)]
    for port, _ in paths:  # warm
        await stream_round(port, streams, Samples())
        await rate_round(port, streams, Samples())
    for turn in range(rounds):
        for port, samples in paths if turn % 2 else reversed(paths):
            await stream_round(port, streams, samples)
    cpu_s = 0.0
    for turn in range(max(3, rounds // 2)):
        for port, samples in paths if turn % 2 else reversed(paths):
            before = cpu_of(proxy_pid)
            await rate_round(port, streams, samples)
            cpu_s += (cpu_of(proxy_pid) - before) if samples is proxied else 0.0
    cpu_s_per_1k = cpu_s / (sum(proxied.requests_per_s) * RATE_ROUND_S) * 1000
    return report(streams, direct, proxied, cpu_s_per_1k, resident_mib(proxy_pid))


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def wait_until_healthy(admin_port: int, deadline_s: float = 10.0) -> None:
    ends_at = monotonic() + deadline_s
    while monotonic() < ends_at:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/status", timeout=1) as answer:
                if json.load(answer)["health"]["ok"]:
                    return
        except OSError:
            pass
        sleep(0.05)
    raise SystemExit(f"the proxy was not healthy after {deadline_s:g} s")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--base-port", type=int, default=32100)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    upstream, proxy, admin = range(options.base_port, options.base_port + 3)
    servers = [subprocess.Popen([sys.executable, __file__, "--serve", str(upstream)])]
    try:
        command = f"--node-id n-0000beef --cell c-bench --generation 1 --port {proxy} "
        command += f"--admin-port {admin} --engine http://127.0.0.1:{upstream} --model tiny --max-concurrency 64"
        words = [sys.executable, "-m", "engine_agent.cell_proxy", *command.split()]
        servers.append(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL))
        wait_until_healthy(admin)
        sys.stdout.write(uvloop.run(measure(options.streams, options.rounds, upstream, proxy, servers[1].pid)))
    finally:
        for server in servers:
            server.kill()
            server.wait()
