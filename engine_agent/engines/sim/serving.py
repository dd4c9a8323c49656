"""The leader's HTTP API: checks a request, runs it, and answers in the form of its path. It computes no tokens and
keeps no state of the cell."""

import asyncio
import random
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from engine_agent.engines.openai_http import (
    App,
    BodyTooLarge,
    ClientLeft,
    Endpoint,
    HealthPage,
    Receive,
    Routes,
    Scope,
    Send,
    error_body,
    find_route,
    models_body,
    read_body,
    respond,
)
from engine_agent.engines.sim.api import pooling
from engine_agent.engines.sim.api.chat import ChatWriter, parse_chat
from engine_agent.engines.sim.api.common import AnswerWriter, model_card
from engine_agent.engines.sim.api.completions import (
    CompletionWriter,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
)
from engine_agent.engines.sim.api.messages import (
    MessagesWriter,
    anthropic_error,
    count_body,
    parse_count,
    parse_messages,
)
from engine_agent.engines.sim.api.pooling import PoolingRequest, parse_input, parse_rerank
from engine_agent.engines.sim.api.responses import ResponsesWriter, parse_responses
from engine_agent.engines.sim.batching import TooLong
from engine_agent.engines.sim.continuing import ContinuationRefused, answer_key, marking_of
from engine_agent.engines.sim.engine import Engine, NotServing, render
from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.generating import GaveUp, Run, write_handed_over, write_stream, write_whole
from engine_agent.engines.sim.planning.answer_plan import Answer, plan_answers
from engine_agent.engines.sim.planning.generation_request import GenerationRequest
from engine_agent.engines.sim.planning.vocabulary import TokenTexts
from engine_agent.protocol.api_surface import CONTEXT_LENGTH_EXCEEDED
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.states import CellRole

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = "sim"
"""`GET /version`."""

Plan = Callable[[GenerationRequest], tuple[Answer, ...]]
Answering = tuple[GenerationRequest, tuple[Answer, ...], AnswerWriter]
Start = Callable[[bytes, str, Plan], Answering]
"""Parses a body, plans its answers, and returns their writer; it gets the unique part of the ids."""


def _chat(modalities: Collection[str], body: bytes, key: str, plan: Plan) -> Answering:
    request = parse_chat(body, modalities)
    answers = plan(request)
    return request, answers, ChatWriter(key, int(time.time()), request, answers)


def _completion(body: bytes, key: str, plan: Plan) -> Answering:
    request = parse_completion(body)
    answers = plan(request)
    return request, answers, CompletionWriter(key, int(time.time()), request, answers)


def _responses(body: bytes, key: str, plan: Plan) -> Answering:
    request = parse_responses(body)
    answers = plan(request.generation)
    return request.generation, answers, ResponsesWriter(key, int(time.time()), request, answers[0])


def _messages(body: bytes, key: str, plan: Plan) -> Answering:
    request = parse_messages(body)
    answers = plan(request)
    return request, answers, MessagesWriter(key, request, answers[0])


@dataclass(frozen=True)
class ServedModel:
    """A model, as clients address it. `adapters`: further names. `max_model_len`: tokens of prompt and answer.
    `modalities`: parts of chats that are accepted in addition to text."""

    name: str
    max_model_len: int
    adapters: Sequence[str] = ()
    modalities: Collection[str] = ()


class ApiServer:
    def __init__(
        self,
        engine: Engine,
        faults: Faults,
        health: HealthPage,
        served: ServedModel,
        seed: int,
        kv_place: Endpoint | None = None,
    ) -> None:
        """`kv_place`: where other engines fetch prompts that this one has read."""
        self._engine = engine
        self._kv_place = kv_place
        self._faults = faults
        self._model = served.name
        self._adapters = frozenset(served.adapters)
        self._max_model_len = served.max_model_len
        self._seed = seed
        self._random = random.Random(seed)
        self._created = int(time.time())
        self._texts = TokenTexts()
        self._routes: Routes = {
            ("POST", "/v1/chat/completions"): partial(self._generate, partial(_chat, served.modalities)),
            ("POST", "/v1/completions"): partial(self._generate, _completion),
            ("POST", "/v1/responses"): partial(self._generate, _responses),
            ("POST", "/v1/messages"): partial(self._generate, _messages),
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/v1/embeddings"): partial(self._pool, parse_input, pooling.embeddings_body),
            **{
                ("POST", path): partial(self._pool, parse_rerank, pooling.rerank_body)
                for path in ("/v1/rerank", "/v2/rerank", "/rerank")
            },
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/health"): health,
            ("GET", "/metrics"): self._metrics,
        }
        names = (served.name, *served.adapters)
        cards = (model_card(name, self._created, served.max_model_len, served.name) for name in names)
        self._cards = {f"/v1/models/{card['id']}": card for card in cards}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fail = partial(_fail, send, scope["path"])
        try:
            await self._route(scope)(scope, receive, send)
        except ClientLeft:
            return
        except ContinuationRefused as error:
            await respond(send, 409, error.body())
        except BadRequest as error:
            await fail(error.status, str(error), error.param, error.code)
        except BodyTooLarge as error:
            await fail(413, str(error), None, "request_too_large")
        except TooLong as error:
            await fail(400, str(error), "max_tokens", None)
        except NotServing as error:
            await fail(503, str(error), None, "engine_not_serving")
        except GaveUp as error:
            await fail(503, str(error), None, "engine_gave_up")

    def _route(self, scope: Scope) -> App:
        if scope["method"] == "GET" and scope["path"] in self._cards:
            return self._card
        route = find_route(self._routes, scope)
        if isinstance(route, int):
            reason = "Not Found" if route == 404 else "Method Not Allowed"
            raise BadRequest(f"{scope['method']} {scope['path']}: {reason}", status=route)
        return route

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, models_body(self._cards.values()))

    async def _card(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode(self._cards[scope["path"]]))

    async def _version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode({"version": VERSION}))

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        page = render(self._engine.meters, self._engine.gauges(), self._model)
        await respond(send, 200, page.encode(), METRICS_TYPE)

    async def _generate(self, start: Start, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        request, answers, writer = start(body, answer_key(scope), self._plan)
        request = self._in_its_part(request)
        marking = marking_of(scope, body, request, answers)
        adapter = request.model if request.model in self._adapters else ""
        run = Run(self._engine, adapter, marking, is_stream=request.stream)
        if request.source is None:
            run.answer(request, answers)
        async with run.watching(receive):
            if request.source is not None:
                run.answer(request, answers, await run.take_over(request.source))
            if request.is_handed_over and self._kv_place is not None:
                await write_handed_over(send, run, request, writer, self._kv_place)
            else:
                await (write_stream if request.stream else write_whole)(send, run, request, writer)

    def _in_its_part(self, request: GenerationRequest) -> GenerationRequest:
        """Removes a handover in which this engine has no part, as vLLM without a connector ignores it. Raises
        BadRequest for several answers or prompts, which no handover covers (CVE-2026-94623)."""
        if request.source is None and not request.is_handed_over:
            return request
        role = self._engine.handover.role
        source = request.source if role is CellRole.DECODE else None
        is_handed_over = request.is_handed_over and role is CellRole.PREFILL
        if (source or is_handed_over) and (
            len(request.prompts) > 1 or request.choices > 1 or (is_handed_over and request.stream)
        ):
            raise BadRequest("only one answer to one prompt can be handed over", param="kv_transfer_params")
        return replace(request, source=source, is_handed_over=is_handed_over)

    async def _pool(
        self,
        parse: Callable[[bytes], PoolingRequest],
        write: pooling.PoolingWriter,
        _scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        request = parse(await read_body(receive))
        self._admit(request.model)
        for tokens in request.reads():
            self._check_length(tokens, "input")
        run = Run(self._engine)
        run.read(request.reads(), request.priority)
        async with run.watching(receive):
            await run.finished()
            body = await asyncio.to_thread(write, request, uuid.uuid4().hex, int(time.time()))
            await respond(send, 200, body)

    async def _count_tokens(self, _scope: Scope, receive: Receive, send: Send) -> None:
        model, prompt = parse_count(await read_body(receive))
        self._check_model(model)
        self._check_length(prompt.tokens, "messages")
        await respond(send, 200, count_body(prompt.tokens))

    async def _tokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        given, prompt = parse_tokenize(await read_body(receive))
        self._check_model(given.model)
        await respond(send, 200, tokenize_body(given, prompt, self._texts, self._max_model_len))

    async def _detokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        given = parse_detokenize(await read_body(receive))
        self._check_model(given.model)
        await respond(send, 200, msgspec.json.encode({"prompt": self._texts.text_of(given.tokens)}))

    def _plan(self, request: GenerationRequest) -> tuple[Answer, ...]:
        self._admit(request.model)
        seed = self._seed + (zlib.crc32(request.model.encode()) if request.model in self._adapters else 0)
        return plan_answers(request, seed, self._max_model_len, self._engine.effects.wrong_answer)

    def _admit(self, model: str) -> None:
        self._check_model(model)
        if self._random.random() < self._faults.error_ratio:
            raise BadRequest("injected fault: error", status=500, code="injected_fault")

    def _check_model(self, model: str | None) -> None:
        if model not in {None, self._model} and model not in self._adapters:
            message = f"The model `{model}` does not exist."
            raise BadRequest(message, param="model", status=404, code="model_not_found")

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens > self._max_model_len:
            message = (
                f"This model's maximum context length is {self._max_model_len} tokens, and the input has {tokens}."
            )
            raise BadRequest(message, param=param, code=CONTEXT_LENGTH_EXCEEDED)


async def _fail(send: Send, path: str, status: int, message: str, param: str | None, code: str | None) -> None:
    if path.startswith("/v1/messages"):
        await respond(send, status, msgspec.json.encode(anthropic_error(status, message, param, code)))
    else:
        await respond(send, status, error_body(status, message, param, code))
