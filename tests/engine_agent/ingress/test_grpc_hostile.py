"""gRPC at an ingress under odd clients, TLS, a gateway that dies, and a port that is in use."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from engine_agent.grpc_gateway.messages.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from engine_agent.grpc_gateway.service import SERVICE
from engine_agent.protocol.ingress_messages import ApplicationTls, ServerCertificate
from engine_agent.protocol.ports import grpc_port, grpc_tls_port
from engine_agent.protocol.states import PlainHttp
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.grpc_gateway.grpc_calls import GrpcClient, infer_request, texts
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.test_grpc import one, serving
from tests.server_certificates import PublicAuthority

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.asyncio]


@pytest_asyncio.fixture
async def cell(ingress: RunningIngress) -> AsyncIterator[FakeCell]:
    async with FakeCell("a", chunks=3, max_connections=200).running() as running:
        await ingress.route(pool(running), grpc=True)
        yield running


@contextlib.asynccontextmanager
async def client_of(ingress: RunningIngress, *options: tuple[str, object]) -> AsyncIterator[GrpcClient]:
    address = f"127.0.0.1:{grpc_port(ingress.settings.port)}"
    own = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(address, own) as channel:
        client = GrpcClient(channel)
        await serving(client)
        yield client


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code: grpc.StatusCode = error.value.code()
    return code


async def test_messages_that_are_too_long_compressed_or_no_messages_fail_alone(
    ingress: RunningIngress, cell: FakeCell
) -> None:
    async with client_of(ingress, ("grpc.max_send_message_length", -1)) as client:
        too_long = infer_request("x" * (5 * 1024 * 1024))
        assert await code_of(client.infer(too_long)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        call = client.unary(f"/{SERVICE}/ModelInfer", ModelInferResponse)
        zipped = call(infer_request("x" * 100_000), compression=grpc.Compression.Gzip)
        assert await code_of(zipped) is grpc.StatusCode.UNIMPLEMENTED
        raw: Any = client.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        assert await code_of(raw(b"\xff" * 100)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(client.unary("/no.Such/Method", ModelInferResponse)(infer_request())) is (
            grpc.StatusCode.UNIMPLEMENTED
        )
        many = ModelInferRequest(model_name="demo")
        for _ in range(300_000):
            many.inputs.add()
        assert await code_of(client.infer(many)) is grpc.StatusCode.INVALID_ARGUMENT
        assert not cell.requests
        long = infer_request("x" * (3 * 1024 * 1024))
        assert texts(await client.infer(long)) == ["a"], "as long as HTTP allows"


async def test_what_is_no_grpc_is_told_so(ingress: RunningIngress, cell: FakeCell) -> None:
    async with client_of(ingress):
        pass
    port = grpc_port(ingress.settings.port)
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient() as http:
            await http.get(f"http://127.0.0.1:{port}/v1/models")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await reader.read() is not None
    writer.close()


async def test_one_address_has_a_limited_number_of_calls(ingress: RunningIngress, cell: FakeCell) -> None:
    cell.release.clear()
    most = ingress.settings.grpc.calls_of_client
    async with client_of(ingress) as first, client_of(ingress) as second, client_of(ingress) as another:
        streams = [client.stream(one(infer_request())) for client in (first, second) for _ in range(most // 2)]
        for stream in streams:
            await stream.read()
        assert await code_of(another.infer(infer_request())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
        cell.release.set()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert texts(await another.infer(infer_request())) == ["a"]
                    break
                await asyncio.sleep(0.05)


async def test_a_client_that_does_not_read_holds_up_no_other(ingress: RunningIngress, cell: FakeCell) -> None:
    cell.chunks = 20_000
    async with client_of(ingress) as client, client_of(ingress) as other:
        deaf = client.stream(one(infer_request()))
        await deaf.read()
        cell.chunks = 3
        for _ in range(20):
            assert len([each async for each in other.stream(one(infer_request()))]) == 4
        deaf.cancel()


async def test_a_gateway_that_dies_is_replaced_and_http_continues(ingress: RunningIngress, cell: FakeCell) -> None:
    async with client_of(ingress) as client:
        first = ingress.ingress.grpc.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert (await ingress.post(b'{"model": "demo"}')).status_code == 200
        await eventually(lambda: ingress.ingress.grpc.pid not in (None, first), what="another gateway")
        await serving(client)
        assert texts(await client.infer(infer_request())) == ["a"]


async def test_a_gateway_survives_its_agent_and_ends_with_the_setting(
    ingress: RunningIngress, cell: FakeCell, tmp_path: Path
) -> None:
    async with client_of(ingress) as client:
        pid = ingress.ingress.grpc.pid
        await ingress.die()
        assert texts(await client.infer(infer_request())) == ["a"]
        later = RunningIngress(tmp_path / "unused")
        later.use(ingress.settings)
        async with later.running():
            await eventually(lambda: later.ingress.grpc.pid == pid, what="the same gateway")
            later.revision = ingress.revision + 1
            await later.route(pool(cell))
            await eventually(lambda: later.ingress.grpc.pid is None, what="no gateway")
            with pytest.raises(grpc.aio.AioRpcError):
                await client.infer(infer_request())


async def test_over_tls_and_plain_only_if_the_region_allows(ingress: RunningIngress, cell: FakeCell) -> None:
    authority = PublicAuthority()
    server = authority.server("localhost")
    pem = authority.chain(server) + server.key_pem
    ingress.ingress.receive(ApplicationTls("1", (ServerCertificate("c", pem),), PlainHttp.REFUSE.value))
    credentials = grpc.ssl_channel_credentials(authority.root.pem.encode())
    address = f"localhost:{grpc_tls_port(ingress.settings.port)}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        client = GrpcClient(channel)
        await serving(client)
        assert texts(await client.infer(infer_request())) == ["a"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port(ingress.settings.port)}") as channel:
        assert await code_of(GrpcClient(channel).infer(infer_request())) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_port_in_use_leaves_grpc_out_and_is_named(ingress: RunningIngress) -> None:
    port = grpc_port(ingress.settings.port)
    async with FakeCell("b").running() as cell:
        with socket.create_server(("127.0.0.1", port)):
            await ingress.route(pool(cell), grpc=True)
            assert f"127.0.0.1:{port} is in use" in ingress.reports[-1].observed.reason
            assert (await ingress.post(b'{"model": "demo"}')).status_code == 200
        async with client_of(ingress) as client:
            assert texts(await client.infer(infer_request())) == ["b"]
