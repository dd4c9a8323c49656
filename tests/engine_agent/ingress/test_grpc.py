"""gRPC at an ingress: HAProxy, the gateway and HAProxy again, with the keys and limits of HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from engine_agent.grpc_gateway.messages import health_pb2
from engine_agent.grpc_gateway.messages.open_inference_pb2 import (
    ModelInferRequest,
    ModelMetadataRequest,
    ModelReadyRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
)
from engine_agent.protocol.ports import grpc_port
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.grpc_gateway.grpc_calls import GrpcClient, infer_request, texts
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared_ingress: RunningIngress) -> AsyncIterator[GrpcClient]:
    """A client of an ingress whose region serves gRPC; the gateway is up."""
    await shared_ingress.route(grpc=True)
    options = (("grpc.enable_retries", 0),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port(shared_ingress.settings.port)}", options) as channel:
        client = GrpcClient(channel)
        await serving(client)
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def cell() -> AsyncIterator[FakeCell]:
    async with FakeCell(chunks=3).running() as running:
        running.usage = {"prompt_tokens": 5, "completion_tokens": 3}
        yield running


async def serving(client: GrpcClient) -> None:
    """Returns when the gateway answers. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await client.health() == health_pb2.HealthCheckResponse.SERVING
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)


async def one(request: ModelInferRequest) -> AsyncIterator[ModelInferRequest]:
    yield request


async def test_an_inference_is_a_request_of_the_key_over_http(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    key = keyed()
    await shared_ingress.route(pool(cell), keys=(key.entry,), keys_required=True, grpc=True)
    metadata = [("authorization", key.headers["Authorization"]), ("x-switchyard-class", "batch")]
    response = await client.infer(infer_request(max_tokens=7, id="abc"), metadata, timeout_s=30)
    assert (texts(response), texts(response, "finish_reason"), response.id) == ([cell.name], ["stop"], "abc")
    counts = {each.name: list(each.contents.uint_contents) for each in response.outputs}
    assert (counts["num_input_tokens"], counts["num_output_tokens"]) == ([5], [3])
    (request,) = cell.requests
    assert (request.path, request.json["max_tokens"]) == ("/v1/chat/completions", 7)
    assert request.headers["x-switchyard-tenant"] == "rufus"
    assert request.headers["x-switchyard-class"] == "batch"
    assert request.headers["x-request-id"] == "abc"
    assert 29_000 < int(request.headers["x-switchyard-deadline-ms"]) < 31_000, "gRPC rounds it up"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("text", "status"), [("", grpc.StatusCode.UNAUTHENTICATED), ("Bearer sw_no", grpc.StatusCode.UNAUTHENTICATED)]
)
async def test_a_call_without_a_valid_key_is_unauthenticated(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell, text: str, status: grpc.StatusCode
) -> None:
    await shared_ingress.route(pool(cell), keys=(keyed().entry,), keys_required=True, grpc=True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.infer(infer_request(), [("authorization", text)] if text else [])
    assert error.value.code() is status
    assert not cell.requests


async def test_a_limit_of_the_key_counts_calls_of_both_protocols(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    key = keyed("11223344", requests_per_min=2)
    await shared_ingress.route(pool(cell), keys=(key.entry,), keys_required=True, grpc=True)
    metadata = [("authorization", key.headers["Authorization"])]
    await client.infer(infer_request(), metadata)
    response = await shared_ingress.http.post(
        "/v1/chat/completions", json={"model": "demo", "messages": []}, headers=key.headers
    )
    assert response.status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.infer(infer_request(), metadata)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit" in str(error.value.details())
    assert int(dict(error.value.trailing_metadata() or ())["grpc-retry-pushback-ms"]) > 0


async def test_a_stream_has_a_response_for_each_token_and_a_final_one(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    await shared_ingress.route(pool(cell), grpc=True)
    responses = [each async for each in client.stream(one(infer_request(id="s")))]
    assert [each.error_message for each in responses] == [""] * 4
    assert "".join(texts(each.infer_response)[0] for each in responses) == "0 1 2 "
    assert [each.infer_response.parameters["triton_final_response"].bool_param for each in responses] == [
        *(False, False, False),
        True,
    ]
    last = {each.name: list(each.contents.uint_contents) for each in responses[-1].infer_response.outputs}
    assert last["num_output_tokens"] == [3]


async def test_an_error_in_a_stream_leaves_it_open(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    await shared_ingress.route(pool(cell), grpc=True)

    async def requests() -> AsyncIterator[ModelInferRequest]:
        yield infer_request(model="nobody", id="bad")
        await asyncio.sleep(0)
        yield infer_request(id="good")

    by_id: dict[str, list[str]] = {"bad": [], "good": []}
    async for each in client.stream(requests()):
        by_id[each.infer_response.id].append(each.error_message)
        if each.error_message:
            assert each.infer_response.parameters["status"].string_param == "NOT_FOUND"
    assert len(by_id["bad"]) == 1
    assert by_id["good"] == [""] * 4


async def test_a_client_that_leaves_or_is_late_cancels_its_request(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    await shared_ingress.route(pool(cell), grpc=True)
    cell.release.clear()
    stream = client.stream(one(infer_request()))
    assert texts((await stream.read()).infer_response) == ["0 "]
    assert cell.in_flight == 1
    stream.cancel()
    late = asyncio.create_task(client.infer(infer_request(), timeout_s=0.3))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await late
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    traffic = shared_ingress.reports
    await eventually(lambda: traffic[-1].telemetry.pools["demo"].in_flight == 0, what="no request in flight")


async def test_health_and_metadata(shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell) -> None:
    await shared_ingress.route(pool(cell), grpc=True)
    assert (await client.call("ServerLive", ServerLiveRequest())).live
    assert (await client.call("ServerReady", ServerReadyRequest())).ready
    assert (await client.call("ModelReady", ModelReadyRequest(name="demo"))).ready
    assert not (await client.call("ModelReady", ModelReadyRequest(name="other"))).ready
    server = await client.call("ServerMetadata", ServerMetadataRequest())
    assert (server.name, server.version) == ("switchyard", shared_ingress.settings.version)
    model = await client.call("ModelMetadata", ModelMetadataRequest(name="demo"))
    assert [each.name for each in model.inputs][:2] == ["text_input", "messages"]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.call("ModelMetadata", ModelMetadataRequest(name="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.health("other")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_access_log_names_the_client_and_not_the_gateway(
    shared_ingress: RunningIngress, client: GrpcClient, cell: FakeCell
) -> None:
    await shared_ingress.route(pool(cell), grpc=True)
    await client.infer(infer_request(id="logged-1"))
    log = shared_ingress.settings.state_dir / "access.log"
    found = await eventually(
        lambda: [line for line in log.read_text().splitlines() if '"logged-1"' in line], what="a line of the log"
    )
    assert '"client":"127.0.0.1"' in found[0]
    assert json.loads(found[0])["path"] == "/v1/chat/completions"
