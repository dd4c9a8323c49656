"""Time to the first token that cell proxy and ingress add in a running fleet.

Streams to one region's cells of a deployment go straight to the engines, through the cell proxies, and through the
ingress, in rounds that alternate within one run, so that all three see the same machine and the same engines.

    .venv/bin/python -m bench added_ttft [--model sim-70b] [--region us-east-1] [--streams 50] [--rounds 10]

Needs a fleet from `make up` (same SWITCHYARD_HOME) on this machine.
"""

import argparse
import asyncio
import json
import os
import random
from time import perf_counter
from typing import cast

import httpx
import uvloop

from bench.figures import percentile
from bench.fleet.live_fleet import Fleet
from engine_agent.protocol.ports import ENGINE, PROXY

STAGGER_S = 0.5
"""Each stream starts at a random moment of this, so that they do not queue for one prefill."""
STREAMS_PER_CONNECTION = 2
END_OF_BODY = b"0\r\n\r\n"
LIMIT_S = 60.0

Address = tuple[str, int]


class Stream(asyncio.Protocol):
    """One keep-alive connection that measures from the request's last byte to the first event with a token."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> float:
        """Send it, read the answer to its end, and return the time to first token in milliseconds."""
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first_at = 0.0
        asked_at = perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(LIMIT_S):
            await self._done
        return (self._first_at - asked_at) * 1000

    def data_received(self, data: bytes) -> None:
        if not self._first_at and b'"content"' in data:
            self._first_at = perf_counter()
        if data.endswith(END_OF_BODY) and not self._done.done():
            if self._first_at:
                self._done.set_result(None)
            else:
                self._done.set_exception(ConnectionError(f"no token in the answer: {data[:200]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed in the middle of an answer"))

    def close(self) -> None:
        self._transport.close()


def request_for(model: str) -> bytes:
    message = {"role": "user", "content": "why? " * 20}
    body = json.dumps({"model": model, "messages": [message], "stream": True, "max_tokens": 8}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


async def stream_round(addresses: list[Address], streams: int, request: bytes) -> list[float]:
    """`streams` connections spread evenly over the addresses; returns every time to first token."""
    loop = asyncio.get_running_loop()
    places = [addresses[index % len(addresses)] for index in range(streams)]
    clients = [(await loop.create_connection(Stream, *place))[1] for place in places]

    async def one(client: Stream) -> list[float]:
        times_ms = []
        for _ in range(STREAMS_PER_CONNECTION):
            await asyncio.sleep(random.uniform(0, STAGGER_S))
            times_ms.append(await client.ask(request))
        return times_ms

    found = await asyncio.gather(*(one(client) for client in clients))
    for client in clients:
        client.close()
    return [ms for times_ms in found for ms in times_ms]


def paths_of(model: str, region: str) -> dict[str, list[Address]]:
    """Where each path begins, as the control plane's API says."""
    fleet = Fleet()
    cells = fleet.rows("cells", deployment=model, region=region, state="ready")
    leaders = [fleet.get(f"nodes/{cell['nodes'][0]['id']}") for cell in cells]
    if not leaders:
        raise SystemExit(f"{model} has no ready cell in {region}")
    ingress = httpx.URL(fleet.get(f"regions/{region}")["ingress_url"])
    return {
        "engine": [(leader["address"], leader["port_base"] + ENGINE) for leader in leaders],
        "cell proxy": [(leader["address"], leader["port_base"] + PROXY) for leader in leaders],
        "ingress + cell proxy": [(ingress.host, cast(int, ingress.port))],
    }


def table(samples: dict[str, list[float]]) -> str:
    rows = [
        "| path | n | TTFT p50 ms | p99 ms | added p50 ms | added p99 ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    base_p50, base_p99 = (percentile(samples["engine"], q) for q in (0.5, 0.99))
    for path, times_ms in samples.items():
        p50, p99 = percentile(times_ms, 0.5), percentile(times_ms, 0.99)
        added = " | | |" if path == "engine" else f" | {p50 - base_p50:+.2f} | {p99 - base_p99:+.2f} |"
        rows.append(f"| {path} | {len(times_ms)} | {p50:.2f} | {p99:.2f}{added}")
    return "\n".join(rows)


async def measure(model: str, region: str, streams: int, rounds: int) -> str:
    paths = paths_of(model, region)
    request = request_for(model)
    samples: dict[str, list[float]] = {path: [] for path in paths}
    for addresses in paths.values():  # warm
        await stream_round(addresses, streams, request)
    for turn in range(rounds):
        order = list(paths)
        for path in order[turn % 3 :] + order[: turn % 3]:
            samples[path] += await stream_round(paths[path], streams, request)
    return (
        f"{model} in {region}, {len(paths['engine'])} cells, {streams} concurrent streams, {rounds} rounds a path, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n\n{table(samples)}"
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sim-70b")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print(uvloop.run(measure(options.model, options.region, options.streams, options.rounds)))
