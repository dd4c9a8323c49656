"""The gRPC services of an ingress: the Open Inference Protocol and gRPC's health checks. Each call becomes requests of
the HTTP API, with the client's key and headers, so keys, limits, routing and accounting are those of HTTP."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias
from urllib.parse import quote

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message

from engine_agent.grpc_gateway.infer_answers import (
    FINAL,
    BadAnswer,
    StreamedAnswer,
    StreamError,
    failed_parameters,
    infer_response,
)
from engine_agent.grpc_gateway.infer_requests import INPUTS, OUTPUTS, BadInferRequest, InferCall, infer_call
from engine_agent.grpc_gateway.ingress_client import HttpAnswer, HttpRequest, IngressClient, NoAnswer, Source
from engine_agent.grpc_gateway.messages import health_pb2, open_inference_pb2
from engine_agent.grpc_gateway.messages.open_inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from engine_agent.grpc_gateway.statuses import Failure, failure_of, failure_of_event, returned_metadata

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
SOURCE_HEADER: Final = "x-switchyard-source"
"""Address and port of the client, which HAProxy states."""
DEADLINE_HEADER: Final = "x-switchyard-deadline-ms"
FORWARDED: Final = frozenset(
    {"authorization", "x-api-key", "x-switchyard-class", DEADLINE_HEADER, "x-session-id", "x-request-id"}
    | {"traceparent", "tracestate", "user-agent"}
)
"""Metadata that become headers. A name that is sent twice is forwarded twice, and refused as over HTTP."""
STREAM_AT_A_TIME: Final = 8
"""Requests of one stream that run at the same time. Further ones are not read."""
STREAM_IDLE_S: Final = 300.0
"""A stream without a request or a response for this long is closed: each occupies a place at the ingress."""
CLIENT_STALL_S: Final = 60.0
"""How long a client may stop reading a stream, as over HTTP: it keeps a slot of its cell for that time."""
WATCH_POLL_S: Final = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a call: its address, and the headers of its HTTP requests."""

    source: Source | None
    headers: tuple[tuple[str, str], ...]

    def request(self, call: InferCall, remaining_s: float | None) -> HttpRequest:
        """The HTTP request for a call. The shortest limit of time counts: the call's, gRPC's, or the parameter's."""
        headers = list(self.headers)
        names = {name for name, _ in headers}
        if "x-request-id" not in names and _REQUEST_ID.fullmatch(call.request_id):
            headers.append(("x-request-id", call.request_id))
        limits = [call.timeout_ms, None if remaining_s is None else max(1, round(remaining_s * 1000))]
        if DEADLINE_HEADER not in names and any(limits):
            headers.append((DEADLINE_HEADER, str(min(filter(None, limits)))))
        return HttpRequest("POST", call.path, tuple(headers), call.body)


def caller_of(context: Context) -> Caller:
    source, headers = None, []
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        if name == SOURCE_HEADER:
            address, _, port = text.partition(" ")
            source = (address, int(port))
        elif name in FORWARDED and text.isprintable():  # no line end, whatever HTTP/2 let through
            headers.append((name, text))
    return Caller(source, tuple(headers))


async def end(context: Context, failure: Failure) -> NoReturn:
    await context.abort(failure.status, failure.message, failure.metadata)
    raise AssertionError("`abort` raises")


class InferenceService:
    """`ingress`: sends requests to the ingress's HAProxy."""

    def __init__(self, ingress: IngressClient) -> None:
        self._ingress = ingress

    async def server_live(self, _: bytes, __: Context) -> Message:
        return open_inference_pb2.ServerLiveResponse(live=True)

    async def server_ready(self, _: bytes, __: Context) -> Message:
        return open_inference_pb2.ServerReadyResponse(ready=await self.is_ready())

    async def model_ready(self, data: bytes, context: Context) -> Message:
        asked = await _parsed(open_inference_pb2.ModelReadyRequest, data, context)
        is_ready = bool(asked.name) and not asked.version and await self.is_ready(asked.name)
        return open_inference_pb2.ModelReadyResponse(ready=is_ready)

    async def server_metadata(self, _: bytes, context: Context) -> Message:
        body = await self._get("/version", caller_of(context), context)
        version = str(msgspec.json.decode(body).get("version", ""))
        return open_inference_pb2.ServerMetadataResponse(
            name="switchyard", version=version, extensions=["model_stream_infer", "health"]
        )

    async def model_metadata(self, data: bytes, context: Context) -> Message:
        asked = await _parsed(open_inference_pb2.ModelMetadataRequest, data, context)
        if asked.version:
            await end(context, Failure(grpc.StatusCode.NOT_FOUND, "models have no versions here: leave version empty"))
        await self._get(f"/v1/models/{quote(asked.name, safe='/')}", caller_of(context), context)
        response = open_inference_pb2.ModelMetadataResponse(name=asked.name, platform="switchyard")
        for name, datatype in INPUTS.items():
            response.inputs.add(name=name, datatype=datatype, shape=[-1])
        for name, datatype in OUTPUTS.items():
            response.outputs.add(name=name, datatype=datatype, shape=[-1, -1] if datatype == "FP32" else [-1])
        return response

    async def model_infer(self, data: bytes, context: Context) -> Message:
        try:
            call = infer_call(await _parsed(ModelInferRequest, data, context), may_stream=False)
            caller = caller_of(context)
            async with self._ingress.send(caller.request(call, context.time_remaining()), caller.source) as answer:
                body = await answer.body()
            if answer.status == 200:
                response = infer_response(call, body)
                context.set_trailing_metadata(returned_metadata(answer.headers))
                return response
            failure = failure_of(answer.status, answer.headers, body)
        except (BadInferRequest, NoAnswer, BadAnswer) as error:
            failure = _own_failure(error)
        return await end(context, failure)

    async def model_stream_infer(self, _: object, context: Context) -> None:
        """Answers each request of the stream by one or more responses. A request that fails ends with an error message
        and leaves the stream open, as in Triton."""
        await _InferStream(self._ingress, context).run()

    async def is_ready(self, model: str = "") -> bool:
        """Whether the ingress serves; with `model`: whether a cell of this region would take its requests."""
        with contextlib.suppress(NoAnswer):
            status, _, _ = await self._ingress.get(f"/health?model={quote(model, safe='')}" if model else "/health")
            return status == 200
        return False

    async def _get(self, target: str, caller: Caller, context: Context) -> bytes:
        try:
            async with self._ingress.send(HttpRequest("GET", target, caller.headers), caller.source) as answer:
                body = await answer.body()
        except NoAnswer as error:
            await end(context, _own_failure(error))
        if answer.status != 200:
            await end(context, failure_of(answer.status, answer.headers, body))
        return body


class _InferStream:
    """One call of ModelStreamInfer. Its requests run side by side; each has one HTTP request, and so counts as one."""

    def __init__(self, ingress: IngressClient, context: Context) -> None:
        self._ingress = ingress
        self._context = context
        self._caller = caller_of(context)
        self._writing = asyncio.Lock()
        self._places = asyncio.Semaphore(STREAM_AT_A_TIME)
        self._active_at_s = 0.0

    async def run(self) -> None:
        """Raises AbortError if the stream is idle or its client does not read."""
        self._note_activity()
        try:
            async with asyncio.TaskGroup() as group:
                idling = group.create_task(self._end_if_idle())
                async with asyncio.TaskGroup() as answers:
                    await self._read(answers)
                idling.cancel()
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None

    async def _read(self, answers: asyncio.TaskGroup) -> None:
        while True:
            await self._places.acquire()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            self._note_activity()
            answers.create_task(self._answer(data))

    async def _end_if_idle(self) -> None:
        while (left_s := self._active_at_s + STREAM_IDLE_S - _now_s()) > 0:  # noqa: ASYNC110 - a limit of time
            await asyncio.sleep(left_s)
        message = f"the stream had no request or response for {STREAM_IDLE_S:g} s"
        await end(self._context, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, message))

    async def _answer(self, data: bytes) -> None:
        request = None
        try:
            request = _decoded(ModelInferRequest, data)
            call = infer_call(request, may_stream=True)
            http = self._caller.request(call, self._context.time_remaining())
            async with self._ingress.send(http, self._caller.source) as answer:
                failure = await self._carry(call, answer)
        except (DecodeError, BadInferRequest, NoAnswer, BadAnswer) as error:
            failure = _own_failure(error)
        finally:
            self._places.release()
        if failure is not None:
            response = ModelStreamInferResponse(error_message=failure.message)
            response.infer_response.id = request.id[:128] if request else ""
            for name, value in failed_parameters(failure.status.name, failure.details()).items():
                response.infer_response.parameters[name].CopyFrom(value)
            await self._write(response)

    async def _carry(self, call: InferCall, answer: HttpAnswer) -> Failure | None:
        """Sends the responses of one answer; returns why it failed, or None."""
        if answer.status != 200:
            return failure_of(answer.status, answer.headers, await answer.body())
        if not call.is_stream:
            whole = infer_response(call, await answer.body())
            whole.parameters[FINAL].bool_param = True
            await self._write(ModelStreamInferResponse(infer_response=whole))
            return None
        streamed = StreamedAnswer(call)
        async for part in answer.parts():
            for response in streamed.feed(part):
                if isinstance(response, StreamError):
                    return failure_of_event(response.error)
                await self._write(ModelStreamInferResponse(infer_response=response))
        if not streamed.is_whole:
            return _own_failure(NoAnswer("the answer broke off"))
        await self._write(ModelStreamInferResponse(infer_response=streamed.end()))
        return None

    async def _write(self, response: ModelStreamInferResponse) -> None:
        async with self._writing:
            try:
                async with asyncio.timeout(CLIENT_STALL_S):
                    await self._context.write(response)
            except TimeoutError:
                message = f"the client read nothing for {CLIENT_STALL_S:g} s"
                await end(self._context, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, message))
        self._note_activity()

    def _note_activity(self) -> None:
        self._active_at_s = _now_s()


class HealthService:
    """gRPC's health checks. The whole server is the service with an empty name."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._is_ready = is_ready

    async def check(self, data: bytes, context: Context) -> Message:
        asked = await _parsed(health_pb2.HealthCheckRequest, data, context)
        if asked.service not in ("", SERVICE, HEALTH_SERVICE):
            message = f"no service is called {asked.service[:80]!r}; for a model call ModelReady"
            await end(context, Failure(grpc.StatusCode.NOT_FOUND, message))
        return health_pb2.HealthCheckResponse(status=await self._status())

    async def watch(self, data: bytes, context: Context) -> AsyncIterator[Message]:
        asked = await _parsed(health_pb2.HealthCheckRequest, data, context)
        is_known, last = asked.service in ("", SERVICE, HEALTH_SERVICE), None
        while True:
            status = await self._status() if is_known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            last = status
            await asyncio.sleep(WATCH_POLL_S)

    async def _status(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        of = health_pb2.HealthCheckResponse
        return of.SERVING if await self._is_ready() else of.NOT_SERVING


def handlers(ingress: IngressClient) -> tuple[grpc.GenericRpcHandler, ...]:
    """The services with their methods. Requests arrive as bytes, because a message that cannot be parsed is the error
    of its client."""
    service = InferenceService(ingress)
    health = HealthService(service.is_ready)
    unary = {
        "ServerLive": service.server_live,
        "ServerReady": service.server_ready,
        "ModelReady": service.model_ready,
        "ServerMetadata": service.server_metadata,
        "ModelMetadata": service.model_metadata,
        "ModelInfer": service.model_infer,
    }
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        **{name: grpc.unary_unary_rpc_method_handler(call, None, _serialized) for name, call in unary.items()},
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(service.model_stream_infer, None, _serialized),
    }
    checks: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check, None, _serialized),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch, None, _serialized),
    }
    return (
        grpc.method_handlers_generic_handler(SERVICE, methods),
        grpc.method_handlers_generic_handler(HEALTH_SERVICE, checks),
    )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


async def _parsed(kind: Any, data: bytes, context: Context) -> Any:
    try:
        return _decoded(kind, data)
    except DecodeError as error:
        return await end(context, _own_failure(error))


def _decoded(kind: Any, data: bytes) -> Any:
    return kind.FromString(data)


def _own_failure(error: Exception) -> Failure:
    if isinstance(error, DecodeError):
        return Failure(grpc.StatusCode.INVALID_ARGUMENT, "the message is not of the method's type")
    if isinstance(error, BadInferRequest):
        return Failure(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, BadAnswer):
        return Failure(grpc.StatusCode.INTERNAL, f"the cell's answer cannot be translated: {error}")
    return Failure(grpc.StatusCode.UNAVAILABLE, str(error))


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _now_s() -> float:
    return asyncio.get_running_loop().time()
