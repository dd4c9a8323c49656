"""The usage ledger of vLLM, given to its server with `--middleware`: notes each of its sequences where vLLM itself
begins to count it, and says what is in its prefix cache, where the launcher had it publish that (`kv_events`).

vLLM (0.32, `v1/engine/output_processor.py`) counts a sequence's tokens for its metrics while it is in
`OutputProcessor.request_states`, and passes over whatever the core computes for it afterwards. The state itself goes on
to exist as long as we hold it, so what it says is what the metrics counted, for those that were aborted, too.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from engine_agent.engines.cache_log import CacheLog
from engine_agent.engines.usage_ledger import (
    App,
    Receive,
    Scope,
    Send,
    SequenceTokens,
    UsageLedger,
    current_exchange,
    note,
    scoped_salt,
)
from engine_agent.engines.vllm.kv_events import FOLDER_VARIABLE, KvEventReader
from engine_agent.protocol.proxy_messages import BlockEvent

BLOCK_TOKENS = 16
"""vLLM's default, until the first event says otherwise."""


class VllmSequence:
    """One `RequestState` of vLLM."""

    def __init__(self, processor: Any, state: Any, engine: Any) -> None:
        self._processor = processor
        self._state = state
        self._engine = engine

    def tokens(self) -> SequenceTokens:
        """See `Sequence`. What its detokenizer has is what usage says; the metrics count what came behind a stop string
        of several tokens, too."""
        state = self._state
        completion = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
        generated = state.stats.num_generation_tokens if state.stats is not None else completion
        return SequenceTokens(
            prompt=state.parent_req.request_id if state.parent_req is not None else state.request_id,
            prompt_tokens=state.prompt_len,
            is_read=not state.is_prefilling,
            cached_tokens=state.num_cached_tokens or 0,
            completion_tokens=completion,
            dropped_tokens=max(0, generated - completion),
        )

    @property
    def is_running(self) -> bool:
        return self._processor.request_states.get(self._state.request_id) is self._state

    async def stop(self) -> None:
        await self._engine.abort([self._state.request_id], internal=True)


class VllmUsageLedger(UsageLedger):
    """The ledger around vLLM's application."""

    def __init__(self, app: App) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        super().__init__(app, CacheLog(BLOCK_TOKENS) if folder else None)
        self._events_folder = Path(folder) if folder else None
        self._engine: Any = None
        self._watch_sequences()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `UsageLedger`. The first call is the server's own, as it starts."""
        if self._events_folder is not None:
            self._read_events(self._events_folder)
            self._events_folder = None
        if self._engine is None and scope["type"] == "http":
            self._engine = getattr(scope["app"].state, "engine_client", None)
        await super().__call__(scope, receive, send)

    def _read_events(self, folder: Path) -> None:
        loop, cache = asyncio.get_running_loop(), self.cache
        if cache is None:
            return

        def add(events: tuple[BlockEvent, ...], block_tokens: int) -> None:
            cache.block_tokens = block_tokens or cache.block_tokens
            cache.add(events)

        KvEventReader(
            folder,
            lambda events, block_tokens: _call_in(loop, add, events, block_tokens),
            lambda: _call_in(loop, cache.forget),
        ).start()

    def _watch_sequences(self) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        add_request = OutputProcessor.add_request

        def noting(processor: Any, request: Any, *args: Any, **more: Any) -> None:
            is_new = request.request_id not in processor.request_states
            # vLLM puts this into the events of the blocks that it stores for the request, and uses it for nothing else.
            if (exchange := current_exchange()) and hasattr(request, "session_id"):
                request.session_id = exchange
            if hasattr(request, "cache_salt"):
                request.cache_salt = scoped_salt(request.cache_salt)
            add_request(processor, request, *args, **more)
            if is_new and (state := processor.request_states.get(request.request_id)) is not None:
                note(VllmSequence(processor, state, self._engine))

        OutputProcessor.add_request = noting


def _call_in(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    """From another thread; harmless once the server has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)
