"""Parts of vLLM's server that the launcher adds with `--middleware`: usage by request and changes of the prefix cache
(`VllmUsageLedger`), step times (`StepsPage`), and the reason of a cell's end (`LeaderHealth`).

vLLM (0.32, `v1/engine/output_processor.py`) counts the tokens of a sequence while it is in
`OutputProcessor.request_states`. The ledger keeps the state, so it reports the same counts as the metrics, also for
aborted requests.

vLLM (`distributed/kv_events.py`) publishes KV events in numbered batches on a PUB socket and keeps the last 10,000 for
a ROUTER socket, which replays missed ones. Events contain the tokens of blocks, so the sockets are files that only the
engine's account can open, and only hashes leave this module. If events are lost for good, the list of blocks is cleared
and grows again with new events."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_agent.engines.usage_ledger import (
    App,
    CacheLog,
    Receive,
    Scope,
    Send,
    SequenceTokens,
    UsageLedger,
    current_exchange,
    note,
    scoped_salt,
)
from engine_agent.engines.vllm.cell.member import member_from, read_end_reason
from engine_agent.engines.vllm.steps import STEPS_PATH, runtime_folder, written_steps
from engine_agent.protocol.proxy_messages import BlockEvent, BlocksRemoved, BlocksStored, CacheCleared

FOLDER_VARIABLE: Final = "SWITCHYARD_KV_EVENTS"
"""Passes the folder of the sockets from the launcher to the server."""
EVENTS_SOCKET, REPLAY_SOCKET = "kv-events", "kv-replay"
POLL_MS = 1000
REPLAY_LIMIT_MS = 5000
"""The replay thread checks for requests ten times a second, and before each batch."""
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, signed=True)
HASH_BYTES = 8
"""Of vLLM's 32: enough to distinguish the blocks of one cache."""
FIRST_GROUP = 0
"""Of a model with several kinds of attention. A prefix must be cached in all groups; the first is reported."""

_Hash = bytes | int


class _Stored(msgspec.Struct, tag="BlockStored"):
    """The fields that are used; tokens are skipped unread."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


def config_of(folder: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder / EVENTS_SOCKET}",
        "replay_endpoint": f"ipc://{folder / REPLAY_SOCKET}",
    }


class KvEventDecoder:
    """Converts vLLM's batches to block events. A block in several places, on the device and in main memory, is removed
    when it has left the last."""

    def __init__(self) -> None:
        self._batches = msgspec.msgpack.Decoder(_Batch)
        self._places: dict[int, set[str]] = {}
        self.block_tokens = 0

    def decode(self, payload: bytes) -> tuple[BlockEvent, ...]:
        """Raises msgspec.DecodeError if it is not a batch of this vLLM."""
        events = (event for raw in self._batches.decode(payload).events for event in self._translate(raw))
        return tuple(events)

    def _translate(self, raw: _Stored | _Removed | _Cleared) -> Iterator[BlockEvent]:
        if isinstance(raw, _Cleared):
            self._places.clear()
            yield CacheCleared()
        elif (raw.group_idx or FIRST_GROUP) != FIRST_GROUP:
            return
        elif isinstance(raw, _Stored):
            self.block_tokens = raw.block_size
            blocks = tuple(map(_short, raw.block_hashes))
            for block in blocks:
                self._places.setdefault(block, set()).add(raw.medium or "")
            parent = 0 if raw.parent_block_hash is None else _short(raw.parent_block_hash)
            yield BlocksStored(parent, blocks, raw.session_id or "")
        elif gone := tuple(self._gone(map(_short, raw.block_hashes), raw.medium or "")):
            yield BlocksRemoved(gone)

    def _gone(self, blocks: Iterable[int], place: str) -> Iterator[int]:
        for block in blocks:
            places = self._places.get(block)
            if places is None:
                continue
            places.discard(place)
            if not places:
                del self._places[block]
                yield block

    def forget(self) -> None:
        self._places.clear()


def _short(block: _Hash) -> int:
    """Returns 63 bits of it, never 0, which means no block."""
    number = block if isinstance(block, int) else int.from_bytes(block[:HASH_BYTES])
    return (number >> 1) | 1 << 62


class KvEventReader:
    """A thread of the API server that reads the core's events. `deliver` gets them in order, with the tokens of a
    block; `lost` is called when some were lost. Both are called in that thread."""

    def __init__(
        self, folder: Path, deliver: Callable[[tuple[BlockEvent, ...], int], None], lost: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._deliver, self._lost = deliver, lost
        self._decoder = KvEventDecoder()
        self._expected = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.RCVHWM, 0)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(f"ipc://{self._folder / EVENTS_SOCKET}")
            while not self._stopped.is_set():
                if events.poll(POLL_MS):
                    self._receive(context, *events.recv_multipart()[-2:])

    def _receive(self, context: Any, number: bytes, payload: bytes) -> None:
        at = int.from_bytes(number)
        if at < self._expected:
            return
        if at > self._expected:
            self._replay(context, at)
        self._apply_events(at, payload)

    def _apply_events(self, at: int, payload: bytes) -> None:
        try:
            events = self._decoder.decode(payload)
        except msgspec.DecodeError:
            self._forget()
        else:
            self._deliver(events, self._decoder.block_tokens)
        self._expected = at + 1

    def _replay(self, context: Any, before: int) -> None:
        """Requests missed events before this number: the first batches of a start, or those that a full queue
        dropped."""
        import zmq

        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(f"ipc://{self._folder / REPLAY_SOCKET}")
            replay.send_multipart((b"", self._expected.to_bytes(NUMBER_BYTES)))
            while self._expected < before and not self._stopped.is_set() and replay.poll(REPLAY_LIMIT_MS):
                number, payload = replay.recv_multipart()[-2:]
                at = int.from_bytes(number)
                if number == END_OF_REPLAY or at >= before:
                    break
                if at > self._expected:
                    self._forget()
                if at >= self._expected:
                    self._apply_events(at, payload)
        if self._expected < before:
            self._forget()

    def _forget(self) -> None:
        self._decoder.forget()
        self._lost()


BLOCK_TOKENS = 16
"""vLLM's default, until the first event states another value."""


class VllmSequence:
    """One `RequestState` of vLLM."""

    def __init__(self, processor: Any, state: Any, engine: Any) -> None:
        self._processor = processor
        self._state = state
        self._engine = engine

    def tokens(self) -> SequenceTokens:
        """See `Sequence`. Usage counts the detokenizer's tokens without those of another engine; the metrics also count
        those behind a stop string of several tokens. An answer that was complete was never read, but its usage has the
        prompt (`continuation.replay`)."""
        state = self._state
        repeated = getattr(state, "repeated_tokens", 0)
        completion = state.detokenizer.num_output_tokens() - repeated if state.detokenizer is not None else 0
        generated = state.stats.num_generation_tokens if state.stats is not None else completion
        return SequenceTokens(
            prompt=state.parent_req.request_id if state.parent_req is not None else state.request_id,
            prompt_tokens=state.prompt_len,
            is_read=not state.is_prefilling,
            cached_tokens=state.num_cached_tokens or 0,
            completion_tokens=completion,
            dropped_tokens=max(0, generated - completion),
            unread_tokens=state.prompt_len + repeated if getattr(state, "was_complete", False) else 0,
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
        """See `UsageLedger`. The server makes the first call when it starts."""
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
            # vLLM only copies this into the events of the blocks that it stores for the request.
            if (exchange := current_exchange()) and hasattr(request, "session_id"):
                request.session_id = exchange
            if hasattr(request, "cache_salt"):
                request.cache_salt = scoped_salt(request.cache_salt)
            add_request(processor, request, *args, **more)
            if is_new and (state := processor.request_states.get(request.request_id)) is not None:
                note(VllmSequence(processor, state, self._engine))

        OutputProcessor.add_request = noting


def _call_in(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    """Calls from another thread; does nothing after the server has stopped."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


class StepsPage:
    """`GET /switchyard/steps`: `StepTimes` as JSON, or 404 while there are none."""

    def __init__(self, app: App) -> None:
        self._app, self._folder = app, runtime_folder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != STEPS_PATH:
            await self._app(scope, receive, send)
            return
        steps = written_steps(self._folder)
        status, body = (200, steps) if steps is not None else (404, b'{"reason": "no steps were measured"}')
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class LeaderHealth:
    """503 with the reason for every request after the end of the cell, to `/health` in the agent's form. One file
    lookup per request."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._ended_file = member_from(os.environ).ended_file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = read_end_reason(self._ended_file) if scope["type"] == "http" else ""
        if not reason:
            await self._app(scope, receive, send)
            return
        error = {"message": f"the cell has ended: {reason}", "type": "service_unavailable", "param": None, "code": 503}
        body = json.dumps({"reason": reason} if scope["path"] == "/health" else {"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
