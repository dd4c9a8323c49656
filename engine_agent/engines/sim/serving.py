"""The leader's OpenAI HTTP: checks a request, queues it in the engine and writes the tokens as they come.

A response starts only with its first token, so a request that the engine gave up before has a clean 503 and may go to
another cell. It computes no tokens and keeps no state of the cell.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine_agent.engines.sim.answers import answer_words, wrong_words
from engine_agent.engines.sim.asgi import (
    BodyTooLarge,
    ClientLeft,
    HealthPage,
    Receive,
    Routes,
    Scope,
    Send,
    find_route,
    read_body,
    respond,
    send_body,
    start_response,
)
from engine_agent.engines.sim.batching import TokenGiven, TooLong
from engine_agent.engines.sim.engine import Aborted, Engine, Generation, NotServing
from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.meters import render
from engine_agent.engines.sim.openai_requests import BadRequest, GenerationRequest, parse_chat, parse_completion
from engine_agent.engines.sim.openai_responses import (
    DONE_EVENT,
    ResponseShape,
    Usage,
    error_body,
    error_event,
    models_body,
)
from engine_agent.engines.sim.prefix_cache import block_hashes

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Completion:
    """What one request gets: a word for each token, and why it ends."""

    words: tuple[str, ...]
    finish_reason: str


def plan_completion(request: GenerationRequest, seed: int, max_model_len: int, wrong: bool) -> Completion:
    """Decide the completion before it is computed, as the time model needs its length.

    Raises:
        BadRequest: the prompt, or prompt and `max_tokens`, exceed `max_model_len`.
    """
    room = max_model_len - request.prompt_tokens
    if room < (request.output_limit or 1):
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{request.output_limit or 1} output tokens and your prompt contains {request.prompt_tokens} tokens.",
            param="max_tokens" if room > 0 else "prompt",
        )
    limit = request.output_limit or room
    natural = answer_words(request.prompt, seed + request.seed, limit if request.exact_length else None)
    words = wrong_words(natural[:limit]) if wrong else natural[:limit]
    return Completion(words, "length" if request.exact_length or len(natural) > limit else "stop")


class OpenAiServer:
    """The application."""

    def __init__(
        self, engine: Engine, faults: Faults, health: HealthPage, model: str, max_model_len: int, seed: int
    ) -> None:
        self._engine = engine
        self._faults = faults
        self._model = model
        self._max_model_len = max_model_len
        self._seed = seed
        self._random = random.Random(seed)
        self._created = int(time.time())
        self._routes: Routes = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): health,
            ("GET", "/metrics"): self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        route = find_route(self._routes, scope)
        if isinstance(route, int):
            reason = "Not Found" if route == 404 else "Method Not Allowed"
            await respond(send, route, error_body(route, f"{scope['method']} {scope['path']}: {reason}"))
        else:
            await route(scope, receive, send)

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, models_body(self._model, self._created, self._max_model_len))

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        page = render(self._engine.meters, self._engine.gauges(), self._model)
        await respond(send, 200, page.encode(), METRICS_TYPE)

    async def _chat(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(parse_chat, True, receive, send)

    async def _completion(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(parse_completion, False, receive, send)

    async def _generate(
        self, parse: Callable[[bytes], GenerationRequest], chat: bool, receive: Receive, send: Send
    ) -> None:
        try:
            request = parse(await read_body(receive))
            completion = self._admit(request)
            generation = self._engine.submit(
                request.prompt_tokens,
                len(completion.words),
                completion.finish_reason,
                request.priority,
                self._blocks(request, completion),
            )
        except ClientLeft:
            return
        except BadRequest as error:
            await respond(send, error.status, error_body(error.status, str(error), error.param, error.code))
            return
        except BodyTooLarge as error:
            await respond(send, 413, error_body(413, str(error)))
            return
        except TooLong as error:
            await respond(send, 400, error_body(400, str(error), "max_tokens"))
            return
        except NotServing as error:
            await respond(send, 503, error_body(503, str(error), code="engine_not_serving"))
            return
        prefix = "chatcmpl" if chat else "cmpl"
        shape = ResponseShape(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self._model, chat)
        writing = _write_stream if request.stream else _write_whole
        async with self._cancelled_when_client_leaves(generation, receive):
            await writing(send, shape, generation, completion, request)

    def _admit(self, request: GenerationRequest) -> Completion:
        if request.model != self._model:
            message = f"The model `{request.model}` does not exist."
            raise BadRequest(message, param="model", status=404, code="model_not_found")
        if self._random.random() < self._faults.error_ratio:
            raise BadRequest("injected fault: error", status=500, code="injected_fault")
        return plan_completion(request, self._seed, self._max_model_len, self._engine.effects.wrong_answer)

    def _blocks(self, request: GenerationRequest, completion: Completion) -> tuple[int, ...]:
        """Of prompt and completion, because the next turn of the conversation begins with both."""
        return block_hashes((*request.context.split(), *completion.words), self._engine.parameters.prefix_block_tokens)

    @asynccontextmanager
    async def _cancelled_when_client_leaves(self, generation: Generation, receive: Receive) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch_client(generation, receive))
        try:
            yield
        finally:
            watch.cancel()
            self._engine.cancel(generation)

    async def _watch_client(self, generation: Generation, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.cancel(generation)
        generation.events.put_nowait(Aborted("the client left"))


async def _write_whole(
    send: Send, shape: ResponseShape, generation: Generation, completion: Completion, request: GenerationRequest
) -> None:
    while True:
        event = await generation.events.get()
        if isinstance(event, Aborted):
            await respond(send, 503, error_body(503, event.reason, code="engine_gave_up"))
            return
        if event.is_last:
            break
    usage = Usage(request.prompt_tokens, len(completion.words))
    await respond(send, 200, shape.whole(" ".join(completion.words), completion.finish_reason, usage))


async def _write_stream(
    send: Send, shape: ResponseShape, generation: Generation, completion: Completion, request: GenerationRequest
) -> None:
    started = False
    while True:
        event = await generation.events.get()
        if isinstance(event, Aborted) and not started:
            await respond(send, 503, error_body(503, event.reason, code="engine_gave_up"))
            return
        if isinstance(event, Aborted):
            await send_body(send, error_event(503, event.reason))
            return
        text = _text_event(shape, completion, event)
        if not started:
            await start_response(send, 200, "text/event-stream; charset=utf-8")
            text = shape.opening_event() + text
            started = True
        if event.is_last:
            break
        await send_body(send, text, more=True)
    usage = shape.usage_event(Usage(request.prompt_tokens, len(completion.words))) if request.include_usage else b""
    await send_body(send, text + usage + DONE_EVENT)


def _text_event(shape: ResponseShape, completion: Completion, token: TokenGiven) -> bytes:
    word = completion.words[token.index]
    text = word if token.index == 0 else f" {word}"
    return shape.text_event(text, completion.finish_reason if token.is_last else None)
