"""OpenAI's completions and chats in front of Triton: each request becomes one of KServe's protocol, and its answers
become one body or a stream. Members that the model does not serve are refused by name."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_agent.engines.openai_http import (
    DONE_EVENT,
    BodyTooLarge,
    ClientLeft,
    HealthPage,
    Receive,
    Routes,
    Scope,
    Send,
    Usage,
    error_body,
    error_event,
    event,
    find_route,
    models_body,
    read_body,
    respond,
    send_body,
    start_response,
)
from engine_agent.engines.triton.kserve import KServe, KServeError, TritonGone
from engine_agent.engines.usage_ledger import SequenceTokens, note
from engine_agent.protocol import request_bodies
from engine_agent.protocol.request_bodies import (
    BadRequest,
    ChatBody,
    CompletionBody,
    ResponseFormat,
    check_chat,
    check_completion,
)

log = logging.getLogger(__name__)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STREAM_TYPE = "text/event-stream; charset=utf-8"
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat has none."""
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop",
    "logit_bias": "logit_bias",
    "ignore_eos": "ignore_eos",
}
"""Members of a request -> llama.cpp's."""
UNSERVED = (
    *("chat_template_kwargs", "documents", "echo", "include_stop_str_in_output", "kv_transfer_params", "logprobs"),
    *("min_tokens", "prompt_logprobs", "reasoning_effort", "return_token_ids", "stop_token_ids"),
    *("structured_outputs", "tools", "tool_choice"),
)
_HARMLESS: Mapping[str, Any] = {"tool_choice": "none"}


@dataclass(frozen=True)
class Request:
    """A request in KServe's terms. `is_chat` decides the form of the answer."""

    model: str
    inputs: Mapping[str, str]
    is_chat: bool
    stream: bool
    include_usage: bool
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choice: Mapping[str, Any] | None, usage: Usage | None, *, is_chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [{"index": 0, "logprobs": None, **choice}],
            **({} if usage is None else {"usage": usage.body()}),
        }

    def chunk(self, text: str, reason: str | None, *, is_first: bool) -> bytes:
        role = {"role": "assistant"} if is_first else {}
        part = {"delta": {**role, "content": text}} if self.is_chat else {"text": text}
        return event(self.body({**part, "finish_reason": reason}, None, is_chunk=True))

    def whole(self, text: str, reason: str, usage: Usage) -> bytes:
        part = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return msgspec.json.encode(self.body({**part, "finish_reason": reason}, usage))

    def closing(self, usage: Usage) -> bytes:
        counts = event(self.body(None, usage, is_chunk=True)) if self.include_usage else b""
        return counts + DONE_EVENT


_chat = msgspec.json.Decoder(ChatBody, strict=False)
_completion = msgspec.json.Decoder(CompletionBody, strict=False)


def read_chat(body: bytes) -> Request:
    """Raises BadRequest if a member is missing, wrong or not served."""
    chat = request_bodies.read_body(_chat, body)
    check_chat(chat)
    messages = [{"role": message.role, "content": message.text()} for message in chat.messages]
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    return _request(chat, {"messages": msgspec.json.encode(messages).decode()}, limit)


def read_completion(body: bytes) -> Request:
    """Raises BadRequest as `read_chat` does."""
    completion = request_bodies.read_body(_completion, body)
    check_completion(completion)
    prompt = completion.prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise BadRequest("`prompt` must be one text for this model", param="prompt", code="unsupported_parameter")
    if _schema_of(completion.response_format) is not None:  # llama.cpp ignores schemas there that it cannot read
        message = "`response_format` is available for chats of this model only"
        raise BadRequest(message, param="response_format", code="unsupported_parameter")
    limit = COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    return _request(completion, {"text_input": prompt}, limit)


def _request(body: ChatBody | CompletionBody, given: Mapping[str, str], limit: int | None) -> Request:
    for name in UNSERVED:
        if (value := getattr(body, name, None)) and value != _HARMLESS.get(name):
            raise BadRequest(f"`{name}` is not available for this model", param=name, code="unsupported_parameter")
    if (body.n or 1) > 1:
        raise BadRequest("`n` must be 1 for this model", param="n", code="unsupported_parameter")
    stated = {ours: value for name, ours in SAMPLING.items() if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        stated["seed"] = body.seed % 2**32
    if limit is not None:
        stated["max_tokens"] = limit
    if (schema := _schema_of(body.response_format)) is not None:
        stated["json_schema"] = schema
    options = body.stream_options
    return Request(
        model=body.model,
        inputs={**given, "sampling_parameters": msgspec.json.encode(stated).decode()},
        is_chat=isinstance(body, ChatBody),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
    )


def _schema_of(given: ResponseFormat | None) -> Any:
    """The schema of the answer, or None for any text."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    if given.type == "json_schema" and given.json_schema is not None and isinstance(given.json_schema.schema, dict):
        return given.json_schema.schema
    message = "`response_format` must be text, json_object, or json_schema with a schema"
    raise BadRequest(message, param="response_format", code="invalid_value")


class Run:
    """One request in Triton, and a sequence of the usage ledger. Its counts are those of the model's last answer."""

    def __init__(self, triton: KServe, request: Request) -> None:
        self._triton = triton
        self._request = request
        self._ended = asyncio.Event()
        self.usage = Usage(0, 0)

    async def answers(self) -> AsyncIterator[tuple[str, str]]:
        """Yields texts, the last one with a reason. Raises KServeError, TritonGone."""
        try:
            async for answer in self._triton.generate({**self._request.inputs, "request_key": self._request.key}):
                self.usage = Usage(answer["prompt_tokens"], answer["completion_tokens"], answer["cached_tokens"])
                yield answer["text_output"], answer["finish_reason"]
                if answer["finish_reason"]:
                    return
            raise TritonGone("Triton ended an answer before its last token")
        finally:
            self._ended.set()

    @asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Cancels the request when its client disconnects; its last answer then has the exact counts."""
        watch = asyncio.create_task(self._watch_client(receive))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self.stop()

    def tokens(self) -> SequenceTokens:
        usage = self.usage
        is_read = usage.prompt_tokens > 0
        key = self._request.key
        return SequenceTokens(key, usage.prompt_tokens, is_read, usage.cached_tokens, usage.completion_tokens)

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    async def stop(self) -> None:
        await self._triton.cancel(self._request.key)


class OpenAiApi:
    """The application. `model`: its name in requests; `context_length`: tokens of prompt and answer together."""

    def __init__(self, triton: KServe, health: HealthPage, model: str, context_length: int) -> None:
        self._triton = triton
        self._model = model
        card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "switchyard"}
        self._cards = models_body([{**card, "max_model_len": context_length}])
        self._routes: Routes = {
            ("POST", "/v1/chat/completions"): self._generates(read_chat),
            ("POST", "/v1/completions"): self._generates(read_completion),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health"): health,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            route = find_route(self._routes, scope)
            if isinstance(route, int):
                reason = "Not Found" if route == 404 else "Method Not Allowed"
                raise BadRequest(f"{reason}: {scope['method']} {scope['path']}", status=route)
            await route(scope, receive, send)
        except ClientLeft:
            return
        except BadRequest as error:
            await respond(send, error.status, error_body(error.status, str(error), error.param, error.code))
        except BodyTooLarge as error:
            await respond(send, 413, error_body(413, str(error), None, "request_too_large"))
        except KServeError as error:
            await respond(send, error.status, error_body(error.status, str(error)))
        except TritonGone as error:
            await respond(send, 503, error_body(503, str(error), None, "engine_not_serving"))

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, self._cards)

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, await self._triton.metrics(), METRICS_TYPE)

    def _generates(self, read: Callable[[bytes], Request]) -> Callable[[Scope, Receive, Send], Any]:
        async def generate(_scope: Scope, receive: Receive, send: Send) -> None:
            request = read(await read_body(receive))
            if request.model != self._model:
                message = f"The model `{request.model}` does not exist."
                raise BadRequest(message, param="model", status=404, code="model_not_found")
            run = Run(self._triton, request)
            note(run)
            async with run.watching(receive):
                await (write_stream if request.stream else write_whole)(send, run, request)

        return generate


async def write_whole(send: Send, run: Run, request: Request) -> None:
    """Sends one body at the end. Raises KServeError, TritonGone."""
    answers = [answer async for answer in run.answers()]
    whole = request.whole("".join(text for text, _ in answers), answers[-1][1], run.usage)
    await respond(send, 200, whole)


async def write_stream(send: Send, run: Run, request: Request) -> None:
    """Sends each text when it is generated. Raises KServeError, TritonGone before the first one."""
    is_first = True
    try:
        async for text, reason in run.answers():
            if is_first:
                await start_response(send, 200, STREAM_TYPE)
            await send_body(send, request.chunk(text, reason or None, is_first=is_first), more=True)
            is_first = False
    except (KServeError, TritonGone) as error:
        if is_first:
            raise
        await send_body(send, error_event(503, str(error)))
        return
    await send_body(send, request.closing(run.usage))
