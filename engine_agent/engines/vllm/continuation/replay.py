"""Tokens of another engine, fed through vLLM's front end: `install` extends the engine client's `generate` and
`_add_request` for requests with a `Run`. Other requests pay for one look at a context variable."""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any

from engine_agent.engines.vllm.continuation.core import CONFIRM, EMITTED
from engine_agent.engines.vllm.vllm_versions import why_no_continuation
from engine_agent.protocol.continuation import Continuation, prompt_mark, prompt_name, tokens_mark

GROUPS_AT_ONCE = 256
"""Groups that are fed before other requests get a turn; some 20 microseconds each."""


class Run:
    """One request that is marked, and continued if it has a `continuation`."""

    def __init__(self, continuation: Continuation | None = None) -> None:
        self.continuation = continuation
        self.refusal = ""
        """Why it cannot be continued; the request fails."""
        self.is_accepted = continuation is None
        """The repeated tokens are processed, so the answer may begin."""
        self._repeated = continuation.tokens if continuation is not None else 0
        self._seen = 0
        self.is_repeating = self._repeated > 0
        """Its events are those that the client has."""
        self._sequences = 0
        self._is_marked = False
        self._prompt = ""
        self._prompt_mark = b""
        self._cached_tokens = 0 if continuation is None else continuation.cached_tokens
        self._pending: list[int] = []
        self.send_mark: Callable[[bytes], Awaitable[None]] | None = None
        """Sends a mark alone, once the client has an event."""

    def begin_sequence(self, params: Any) -> str:
        """Returns why this call of `generate` cannot be continued. A stream of several sequences has no marks."""
        self._sequences += 1
        several = self._sequences > 1 or getattr(params, "n", 1) != 1
        if several:
            self._sequences = 2
        return "it generates several sequences" if several else ""

    def begin_marks(self, prompt: str) -> None:
        """`prompt`: `N:D` of the prompt."""
        self._prompt, self._is_marked = prompt, True
        self._prompt_mark = prompt_mark(prompt, self._cached_tokens)

    async def announce(self) -> None:
        """Sends the mark of the prompt now if the client has events already: Responses begin with two that wait for no
        token. Without the mark their streams could not continue until the prompt is read."""
        if self.send_mark is not None and (mark := self.take_marks()):
            await self.send_mark(mark)

    async def watch(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yields the outputs, and notes the tokens of each before the server processes it."""
        async with aclosing(outputs):
            async for output in outputs:
                ids = output.outputs[0].token_ids
                self.is_repeating = self.is_repeating and self._seen < self._repeated
                self._seen += len(ids)
                self._pending += ids
                self._note_cached(output)
                yield output

    def _note_cached(self, output: Any) -> None:
        """Marks the prompt again once it is known what of it was cached. A repeat states that of the first run, as here
        repeated tokens count as well."""
        if self.continuation is not None:
            output.num_cached_tokens = self._cached_tokens
        elif self._is_marked and not self._cached_tokens and output.num_cached_tokens:
            self._cached_tokens = output.num_cached_tokens
            self._prompt_mark = prompt_mark(self._prompt, self._cached_tokens)

    def take_marks(self) -> bytes:
        """Returns the marks for the next event."""
        if not self._is_marked or self._sequences != 1:
            return b""
        marks, self._prompt_mark = self._prompt_mark, b""
        if self._pending:
            marks += tokens_mark(self._pending)
            self._pending = []
        return marks


Groups = Sequence[Sequence[int]]
_current: ContextVar[Run | None] = ContextVar("continuation", default=None)


def begin(run: Run) -> Any:
    """Makes `run` that of the current task and of those that it starts; returns the token for `end`."""
    return _current.set(run)


def end(token: Any) -> None:
    _current.reset(token)


def install() -> str:
    """Extends vLLM in the API server's process; returns why it cannot, in words for the log."""
    try:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    except ImportError as error:
        return str(error)
    if why := why_no_continuation(AsyncLLM, OutputProcessor, RequestOutputCollector, EngineCoreOutput):
        return why
    if getattr(AsyncLLM.generate, "can_continue", False):
        return ""
    _extend_client(AsyncLLM, VLLMValidationError)
    _refuse_foreign_output(OutputProcessor, VLLMValidationError)
    return ""


def _extend_client(client: Any, error: type[Exception]) -> None:
    plain_generate, plain_add = client.generate, client._add_request

    def refuse(run: Run, why: str) -> None:
        run.refusal = why
        raise error(f"this stream cannot continue here: {why}")

    def generate(engine: Any, prompt: Any, sampling_params: Any, *args: Any, **named: Any) -> Any:
        run = _current.get()
        if run is None:
            return plain_generate(engine, prompt, sampling_params, *args, **named)
        why = run.begin_sequence(sampling_params)
        if why and run.continuation is not None:
            refuse(run, why)
        return run.watch(plain_generate(engine, prompt, sampling_params, *args, **named))

    async def add_request(engine: Any, request: Any, prompt: Any, parent: Any, index: int, queue: Any) -> None:
        run = _current.get()
        if run is None or request.sampling_params is None:
            return await plain_add(engine, request, prompt, parent, index, queue)  # type: ignore[no-any-return]
        resumes = await _confirmed(engine)
        why = why_unmarked(engine, request) if resumes else "this engine's core cannot resume requests"
        if run.continuation is not None and (why := why or why_refused(engine, request, run.continuation)):
            refuse(run, why)
        if not why:
            run.begin_marks(prompt_name(request.prompt_token_ids))
        if run.continuation is None:
            await run.announce()
            return await plain_add(engine, request, prompt, parent, index, queue)  # type: ignore[no-any-return]
        await _add_with_output(engine, request, prompt, queue, run.continuation.groups, partial(refuse, run))
        run.is_accepted = True
        return None

    generate.__dict__["can_continue"] = True
    client.generate, client._add_request = generate, add_request


async def _add_with_output(
    engine: Any, request: Any, prompt: Any, queue: Any, groups: Groups, refuse: Callable[[str], None]
) -> None:
    """As `AsyncLLM._add_request`, with the repeated tokens between the front end and the core."""
    processor = engine.output_processor
    engine.check_admission(request_id=request.request_id)
    processor.add_request(request, prompt, None, 0, queue)
    try:
        replayed = deque[Any]()
        for fed, why in enumerate(feed(engine, request, groups, queue, replayed)):
            if why:
                refuse(why)
            if fed % GROUPS_AT_ONCE == GROUPS_AT_ONCE - 1:
                await asyncio.sleep(0)
        _yield_first(queue, replayed)
        if processor.has_request(request.request_id):
            emitted = [token for group in groups for token in group]
            params = request.sampling_params
            params.extra_args = {**(params.extra_args or {}), EMITTED: emitted}
            await engine.engine_core.add_request_async(request)
    except BaseException:
        processor.abort_requests([request.request_id], internal=True)
        raise


def why_unmarked(engine: Any, request: Any) -> str:
    """Returns why no other engine could continue this request; empty if one can."""
    params = request.sampling_params
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "its prompt has embeddings"
    if params.output_kind.name == "CUMULATIVE":
        return "its outputs repeat all tokens"
    if params.prompt_logprobs is not None:
        return "it asks for log probabilities of its prompt"
    if params.seed is not None and params.temperature > 0 and not repeats_seeds(engine.vllm_config):
        return "this model runner does not repeat the numbers that a seed gave"
    return ""


def why_refused(engine: Any, request: Any, continuation: Continuation) -> str:
    """Returns why these tokens are not those of a first run of this request; empty if they may be."""
    prompt, model = prompt_name(request.prompt_token_ids), engine.vllm_config.model_config
    if continuation.prompt_name != prompt:
        return f"its prompt is {prompt} here, and was {continuation.prompt:.80}"
    if not all(continuation.groups):
        return "a group is empty"
    if len(request.prompt_token_ids) + continuation.tokens > model.max_model_len:
        return f"its {continuation.tokens} tokens exceed the context of {model.max_model_len}"
    if max(map(max, continuation.groups), default=0) >= (size := model.get_vocab_size()):
        return f"a token is not in this vocabulary of {size}"
    return ""


def repeats_seeds(config: Any) -> bool:
    """The second model runner derives random numbers from the seed and the position; `core.skip_draws` skips those of
    the first on CPU. With speculation the numbers depend on the guesses."""
    is_known = config.use_v2_model_runner or config.device_config.device_type == "cpu"
    return is_known and config.speculative_config is None


def feed(engine: Any, request: Any, groups: Sequence[Sequence[int]], queue: Any, replayed: deque[Any]) -> Iterator[str]:
    """Processes one group at a time as vLLM processes the core's outputs, and appends its results to `replayed`. Yields
    after each group why the repeat is refused; empty if it is not."""
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

    processor, max_model_len = engine.output_processor, engine.vllm_config.model_config.max_model_len
    state = processor.request_states[request.request_id]
    like_core = Request.from_engine_core_request(request, None)
    state.queue = _Recorder(replayed)
    for group in groups:
        if not processor.has_request(request.request_id):
            yield "it has tokens after its end"
            return
        finish = None
        for place, token in enumerate(group, 1):
            like_core.append_output_token_ids(token)
            if check_stop(like_core, max_model_len):
                finish = like_core.get_finished_reason()
                if place < len(group):
                    yield "it has tokens after its end"
                    return
                break
        _leave_out_logprobs(state, group)
        output = EngineCoreOutput(
            request.request_id, list(group), finish_reason=finish, stop_reason=like_core.stop_reason
        )
        with _Untraced(processor):
            processor.process_outputs([output])
        yield ""
    state.queue = queue
    state.repeated_tokens = like_core.num_output_tokens
    state.was_complete = not processor.has_request(request.request_id)
    state.is_prefilling = not state.was_complete


class _Recorder:
    """Keeps each output of a request, where its queue would merge them."""

    def __init__(self, outputs: deque[Any]) -> None:
        self._outputs = outputs

    def put(self, output: Any) -> None:
        """Raises an output that is an error, as the queue's reader does."""
        if isinstance(output, Exception):
            raise output
        self._outputs.append(output)


class _Untraced:
    """vLLM traces a request when it ends, from times that a repeated one has not."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._is_traced = processor, processor.tracing_enabled

    def __enter__(self) -> None:
        self._processor.tracing_enabled = False

    def __exit__(self, *_: object) -> None:
        self._processor.tracing_enabled = self._is_traced


def _leave_out_logprobs(state: Any, group: Sequence[int]) -> None:
    """Fills the places of repeated tokens, whose log probabilities only the first engine knew. Their events are never
    sent again."""
    known = state.logprobs_processor.logprobs
    if known is None:
        return
    from vllm.logprobs import append_logprobs_for_next_position

    for token in group:
        append_logprobs_for_next_position(known, [token], [0.0], [""], 1, 0)


def _yield_first(queue: Any, replayed: deque[Any]) -> None:
    """Lets the reader of a queue take these outputs first; it asks with `get_nowait` before it waits."""
    get_nowait = queue.get_nowait
    queue.get_nowait = lambda: replayed.popleft() if replayed else get_nowait()


async def _confirmed(engine: Any) -> bool:
    """Asks the core once whether it is patched; patches the workers."""
    asked: asyncio.Task[bool] | None = getattr(engine, CONFIRM, None)
    if asked is None:
        asked = asyncio.get_running_loop().create_task(_ask_core(engine))
        setattr(engine, CONFIRM, asked)
    return await asyncio.shield(asked)


async def _ask_core(engine: Any) -> bool:
    try:
        return bool(await engine.engine_core.call_utility_async(CONFIRM))
    except Exception as error:  # vLLM raises a plain one for any failure in the core
        sys.stderr.write(f"streams cannot continue at this engine: {error}\n")
        return False


def _refuse_foreign_output(processor: Any, error: type[Exception]) -> None:
    """Clients can write `extra_args` of sampling parameters, and output of a client's choice could be any number."""
    plain = processor.add_request

    def add_request(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra and EMITTED in extra:
            raise error(f"{EMITTED} is not a parameter of requests")
        return plain(self, request, *args, **named)

    processor.add_request = add_request
