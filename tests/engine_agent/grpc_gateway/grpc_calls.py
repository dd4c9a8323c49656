"""A gRPC client of an ingress for tests: grpcio with the gateway's own messages."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from engine_agent.grpc_gateway.messages import health_pb2, open_inference_pb2
from engine_agent.grpc_gateway.messages.open_inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from engine_agent.grpc_gateway.service import HEALTH_SERVICE, SERVICE

Metadata = Sequence[tuple[str, str]]


def infer_request(text: str = "hi", model: str = "demo", **parameters: Any) -> ModelInferRequest:
    """A chat of one message."""
    request = ModelInferRequest(model_name=model, id=parameters.pop("id", "r-1"))
    tensor = request.inputs.add(name="messages", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(json.dumps([{"role": "user", "content": text}]).encode())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


class GrpcClient:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def infer(self, request: ModelInferRequest, metadata: Metadata = (), timeout_s: float | None = 60) -> Any:
        return await self.call("ModelInfer", request, metadata=metadata, timeout_s=timeout_s)

    async def call(self, method: str, request: Any, metadata: Metadata = (), timeout_s: float | None = 60) -> Any:
        answer = getattr(open_inference_pb2, f"{method}Response")
        return await self.unary(f"/{SERVICE}/{method}", answer)(request, metadata=tuple(metadata), timeout=timeout_s)

    def unary(self, path: str, answer: Any) -> Any:
        return self.channel.unary_unary(path, lambda message: message.SerializeToString(), answer.FromString)

    async def health(self, service: str = "") -> Any:
        call = self.unary(f"/{HEALTH_SERVICE}/Check", health_pb2.HealthCheckResponse)
        return (await call(health_pb2.HealthCheckRequest(service=service), timeout=60)).status

    def stream(self, requests: AsyncIterator[ModelInferRequest], metadata: Metadata = ()) -> Any:
        call: Any = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            lambda message: message.SerializeToString(),
            ModelStreamInferResponse.FromString,
        )
        return call(requests, metadata=tuple(metadata), timeout=60)


def texts(response: Any, name: str = "text_output") -> list[str]:
    output = next(each for each in response.outputs if each.name == name)
    return [text.decode() for text in output.contents.bytes_contents]
