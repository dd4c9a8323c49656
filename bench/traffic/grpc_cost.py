"""CPU time of an ingress per request and per token, over HTTP and over gRPC.

One ingress with its gRPC gateway, in front of stub cells that cost next to nothing. Whole answers are one request each;
streams have 16 tokens. Rounds of the four kinds alternate. The clients are not counted. What the ingress takes while it
is idle is subtracted.

    .venv/bin/python -m bench grpc_cost [--rounds 5] [--requests 2000]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
import httpx

from bench import RESULTS, note
from bench.traffic import contenders
from bench.traffic.contenders import MODEL, PLACES, Contender
from bench.traffic.proxies import STREAM, WHOLE, wire_build, wire_cells
from engine_agent.grpc_gateway.messages.open_inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from engine_agent.grpc_gateway.service import SERVICE
from engine_agent.protocol.ingress_messages import CellEndpoint
from engine_agent.protocol.ports import grpc_port

BASE_PORT = 27_600
AT_A_TIME = 32
TOKENS = 16
IDLE_S = 5.0
STREAM_SHARE = 10
"""One stream for so many whole answers: a stream takes 16 times as long."""


def infer_request(body: dict[str, Any]) -> ModelInferRequest:
    request = ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="messages", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(json.dumps(body["messages"]).encode())
    for name in ("max_tokens", "seed"):
        if name in body:
            request.parameters[name].int64_param = body[name]
    return request


class Clients:
    """One client of each protocol."""

    def __init__(self, port: int, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._http = http
        serialize = ModelInferRequest.SerializeToString
        self._unary = channel.unary_unary(f"/{SERVICE}/ModelInfer", serialize, ModelInferResponse.FromString)
        self._stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", serialize, ModelStreamInferResponse.FromString
        )

    async def http_whole(self) -> None:
        (await self._http.post(self._url, json=WHOLE)).raise_for_status()

    async def http_stream(self) -> None:
        async with self._http.stream("POST", self._url, json=STREAM) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass

    async def grpc_whole(self) -> None:
        await self._unary(infer_request(WHOLE))

    async def grpc_stream(self) -> None:
        async for response in self._stream(iter([infer_request(STREAM)])):
            if response.error_message:
                raise RuntimeError(response.error_message)


async def repeat(call: Callable[[], Awaitable[None]], count: int) -> None:
    places = asyncio.Semaphore(AT_A_TIME)

    async def once() -> None:
        async with places:
            await call()

    await asyncio.gather(*(once() for _ in range(count)))


@contextmanager
def ingress() -> Iterator[Contender]:
    with wire_cells(wire_build(RESULTS), BASE_PORT, 2):
        ends = [CellEndpoint(f"c-{port}", 1, "127.0.0.1", port, PLACES) for port in (BASE_PORT, BASE_PORT + 1)]
        port = BASE_PORT + 10
        with contenders.ingress(RESULTS / "runs" / "grpc", port, ends, grpc=True) as process:
            contenders.wait_until_it_answers(port, process=process)
            yield Contender("ingress", port, (process,))


async def measure(contender: Contender, rounds: int, requests: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    limits = httpx.Limits(max_connections=AT_A_TIME)
    address = f"127.0.0.1:{grpc_port(contender.port)}"
    async with httpx.AsyncClient(limits=limits, timeout=60) as http, grpc.aio.insecure_channel(address) as channel:
        clients = Clients(contender.port, http, channel)
        await answered(clients.grpc_whole)
        kinds = {
            "HTTP, request": (clients.http_whole, requests, 1),
            "gRPC, request": (clients.grpc_whole, requests, 1),
            "HTTP, token of a stream": (clients.http_stream, requests // STREAM_SHARE, TOKENS),
            "gRPC, token of a stream": (clients.grpc_stream, requests // STREAM_SHARE, TOKENS),
        }
        for call, _, _ in kinds.values():
            await repeat(call, AT_A_TIME)
        before = contender.cpu_s()
        await asyncio.sleep(IDLE_S)
        idle = (contender.cpu_s() - before) / IDLE_S
        note("grpc_cost", {"kind": "idle", "cpu_share": round(idle, 4)})
        for _ in range(rounds):
            for name, (call, count, parts) in kinds.items():
                before, began = contender.cpu_s(), time.monotonic()
                await repeat(call, count)
                took_s = time.monotonic() - began
                cpu_us = 1e6 * (contender.cpu_s() - before - idle * took_s) / count / parts
                found.setdefault(name, []).append(cpu_us)
                note("grpc_cost", {"kind": name, "cpu_us": round(cpu_us, 1), "per_s": round(count / took_s, 1)})
    return found


async def answered(call: Callable[[], Awaitable[None]]) -> None:
    """Returns once the gateway answers. Raises the last error after some time."""
    for left in range(100, -1, -1):
        try:
            await call()
            break
        except grpc.aio.AioRpcError as error:
            if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.1)


async def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    with ingress() as contender:
        found = await measure(contender, options.rounds, options.requests)
        print(f"resident memory: {contender.resident_mib():.0f} MiB")
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):.0f} µs of CPU, {min(values):.0f} to {max(values):.0f}")
