"""Runs requests in the engine: queues their sequences, and writes the answers as streams or as one body. A response
starts with its first token, so a request that the engine aborted before gets a clean 503 and may be sent to another
cell."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine_agent.engines.openai_http import Endpoint, Receive, Send, Usage, respond, send_body, start_response
from engine_agent.engines.sim.api.common import AnswerWriter
from engine_agent.engines.sim.batching import NO_HANDOVER, Handover
from engine_agent.engines.sim.continuing import MarkedWriter, Marking
from engine_agent.engines.sim.engine import Aborted, Engine, Events, Generation, PromptCount
from engine_agent.engines.sim.kv_transfer import TakeOverFailed, take_over
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt, Source, params_of
from engine_agent.engines.sim.prefix_cache import block_hashes
from engine_agent.engines.usage_ledger import scoped_salt

log = logging.getLogger(__name__)
STREAM_TYPE = "text/event-stream; charset=utf-8"


class GaveUp(Exception):
    """The engine aborted a request before anything of its response was sent."""


class Run:
    """The generations of one request in the engine: one for each answer, in order. `adapter`: cached keys and values of
    other adapters are not used."""

    def __init__(
        self, engine: Engine, adapter: str = "", marking: Marking | None = None, *, is_stream: bool = False
    ) -> None:
        """`is_stream`: each token is an event, not only the last one of each answer."""
        self._engine = engine
        self._is_stream = is_stream
        self.marking = marking
        self._adapter = adapter
        self.events = Events()
        self.generations: list[Generation] = []

    async def take_over(self, source: Source) -> int:
        """Fetches what another engine has read; returns the number of tokens. On failure the prompt is read here
        (vLLM's policy `recompute`)."""
        try:
            return await take_over(source, self._engine.handover, source.tokens)
        except TakeOverFailed as error:
            self._engine.meters.failed_transfers += 1
            log.warning("will read a prompt again: %s", error)
            return 0

    def answer(self, request: GenerationRequest, answers: Sequence[Answer], taken_over: int = 0) -> None:
        """Queues a sequence for each answer; `taken_over` tokens of the prompt are here. Raises NotServing, TooLong if
        no sequence is queued."""
        counts = [PromptCount() for _ in request.prompts]
        for index, answer in enumerate(answers):
            place = index // request.choices
            prompt = request.prompts[place]
            blocks = self._blocks(prompt, answer)
            reason = "length" if answer.finish_reason == "length" else "stop"
            self._submit(
                *(prompt.tokens + self._replayed, len(answer.tokens) - self._replayed, reason),
                *(request.priority, blocks, counts[place]),
                handover=Handover(taken_over, request.is_handed_over),
            )

    @property
    def _replayed(self) -> int:
        """Tokens of the answer that belong to the prompt here: another engine generated them."""
        return self.marking.replayed if self.marking is not None else 0

    def read(self, lengths: Sequence[int], priority: int) -> None:
        """Queues a sequence for each text that is only read, by its length in tokens. Raises NotServing, TooLong if no
        sequence is queued."""
        for tokens in lengths:
            self._submit(tokens, 0, "stop", priority, (), None)

    def _submit(
        self,
        prompt: int,
        output: int,
        reason: str,
        priority: int,
        blocks: tuple[int, ...],
        count: PromptCount | None,
        *,
        handover: Handover = NO_HANDOVER,
    ) -> None:
        try:
            generation = self._engine.submit(prompt, output, reason, priority, blocks, self.events, count, handover)
        except Exception:
            self.cancel()
            raise
        generation.tells_each_token = self._is_stream
        self.generations.append(generation)

    def _blocks(self, prompt: Prompt, answer: Answer) -> tuple[int, ...]:
        """Of prompt and answer, because the next turn of a conversation begins with both."""
        words = (*prompt.context.split(), *(token.text.strip() for token in answer.tokens))
        scope = f"{self._adapter}|{salt}" if (salt := scoped_salt(None)) else self._adapter
        return block_hashes(words, self._engine.parameters.prefix_block_tokens, scope)

    def cancel(self) -> None:
        for generation in self.generations:
            self._engine.cancel(generation)

    @asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Cancels the run when its client disconnects, and at the end."""
        watch = asyncio.create_task(self._watch_client(receive))
        try:
            yield
        finally:
            watch.cancel()
            self.cancel()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()
        self.events.put_nowait(Aborted("the client disconnected"))

    async def finished(self) -> None:
        left = len(self.generations)
        while left:
            event = await self.events.get()
            if isinstance(event, Aborted):
                raise GaveUp(event.reason)
            left -= event.is_last

    def transfer_params(self, place: Endpoint) -> dict[str, Any] | None:
        """Returns where another engine fetches the prompt; None if it is not kept."""
        sequence = self.generations[0].sequence
        name = self._engine.leases.request_of(sequence.id)
        if name is None:
            return None
        source = Source(name, place.host, place.port, sequence.prompt_tokens)
        return params_of(source, f"sim-{place}", self._engine.parameters.prefix_block_tokens)

    def usage(self, request: GenerationRequest) -> Usage:
        """Returns the usage of the request: each prompt once, and all tokens so far."""
        return Usage(
            sum(prompt.tokens for prompt in request.prompts),
            sum(generation.generated for generation in self.generations) + self._replayed,
            sum(generation.cached_tokens for generation in self.generations if generation.counts_prompt),
        )


async def write_whole(send: Send, run: Run, request: GenerationRequest, writer: AnswerWriter) -> None:
    """Sends one body, once everything is computed. Raises GaveUp."""
    await run.finished()
    await respond(send, 200, writer.whole(run.usage(request)))


async def write_handed_over(
    send: Send, run: Run, request: GenerationRequest, writer: AnswerWriter, place: Endpoint
) -> None:
    """Sends one body with the parameters by which another engine fetches the prompt; None if it is no longer kept.
    Raises GaveUp."""
    await run.finished()
    body = msgspec.json.decode(writer.whole(run.usage(request)))
    body["kv_transfer_params"] = run.transfer_params(place)
    await respond(send, 200, msgspec.json.encode(body))


async def write_stream(send: Send, run: Run, request: GenerationRequest, writer: AnswerWriter) -> None:
    """Sends each token when it is computed. Raises GaveUp."""
    if run.marking is not None:
        writer = MarkedWriter(writer, run.marking)
    places = {generation.sequence.id: index for index, generation in enumerate(run.generations)}
    left = len(places)
    started = False
    while True:
        event = await run.events.get()
        if isinstance(event, Aborted):
            if not started:
                raise GaveUp(event.reason)
            await send_body(send, writer.error_event(503, event.reason))
            return
        text = b"" if started else writer.opening(run.usage(request))
        text += writer.token_event(places[event.sequence], event.index)
        if not started:
            await start_response(send, 200, STREAM_TYPE)
            started = True
        left -= event.is_last
        if not left:
            break
        if text:
            await send_body(send, text, more=True)
    await send_body(send, text + writer.closing(run.usage(request)))
