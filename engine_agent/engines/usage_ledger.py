"""What an engine computed for each request of its cell proxy, and the changes of its prefix cache: parts of the
engine's HTTP on loopback.

The proxy names a request (`x-switchyard-exchange`). Everything the engine computes for it is counted under this name,
so `GET /switchyard/usage?exchange=NAME` returns the exact usage of a request even if its client disconnected. The
answer waits until the request is over; sequences that still run are stopped. The cost is one note per sequence, none
per token.

Changes of the cache are kept so that the proxy can follow them (`CacheLog`). A reader that is too far behind gets all
blocks. Memory is bounded by `MAX_BLOCKS`: a larger cache is no longer listed."""

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import getrandbits
from time import monotonic
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec

from engine_agent.protocol.proxy_messages import (
    CACHE_POLL_S,
    CACHE_SCOPE_HEADER,
    COUNTED_APART_PATH,
    END_LIMIT_S,
    EVENTS_PATH,
    EXCHANGE_HEADER,
    MAX_BLOCKS,
    PROMPT_TOKENS_HEADER,
    READ_LIMIT_S,
    READ_PATH,
    USAGE_PATH,
    BlockChanges,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CountedApart,
    ExchangeUsage,
)

KEPT_BLOCKS = 100_000
"""Blocks named in the events that are kept: 1.6 million tokens, minutes of a busy engine. Readers poll every second."""


class CacheLog:
    """The changes of one cache. Used only from the thread of the engine's HTTP."""

    def __init__(self, block_tokens: int, *, kept_blocks: int = KEPT_BLOCKS, most_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._kept_blocks, self._most_blocks = kept_blocks, most_blocks
        self._life = f"{getrandbits(64):016x}"
        self._parents: dict[int, int] = {}
        """Block -> the block before it, of all blocks in the cache."""
        self._events: deque[BlockEvent] = deque()
        self._named = 0
        self._upto = 0
        self._changed = asyncio.Event()
        self.overflowed = False

    def add(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            self._apply(event)
            self._events.append(event)
            self._named += _size(event)
            self._upto += 1
        while self._events and self._named > self._kept_blocks:
            self._named -= _size(self._events.popleft())
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self) -> None:
        """Clears the list after lost events: it then contains what was stored since, which is less than the cache has,
        never more."""
        self.add((CacheCleared(),))

    def _apply(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored(parent, blocks, _):
                for block in blocks:
                    self._parents[block] = parent
                    parent = block
                if len(self._parents) > self._most_blocks:
                    self.overflowed = True
                    self._parents.clear()
            case BlocksRemoved(blocks):
                for block in blocks:
                    self._parents.pop(block, None)
            case CacheCleared():
                self._parents.clear()

    def after(self, life: str, number: int) -> BlockChanges:
        """Returns what a reader needs that knows everything up to `number` of `life`."""
        oldest = self._upto - len(self._events)
        if life == self._life and oldest <= number <= self._upto:
            news = tuple(self._events)[number - oldest :]
            return BlockChanges(self._life, self._upto, False, self.block_tokens, news)
        # The complete history also names the requests that blocks were stored for.
        whole = self._events if oldest == 0 else self._all_blocks()
        return BlockChanges(self._life, self._upto, True, self.block_tokens, tuple(whole))

    def _all_blocks(self) -> Iterator[BlocksStored]:
        """Yields all blocks, chains together. Their parents may have been removed."""
        run: list[int] = []
        first = 0
        for block, parent in self._parents.items():
            if run and parent != run[-1]:
                yield BlocksStored(first, tuple(run))
                run = []
            if not run:
                first = parent
            run.append(block)
        if run:
            yield BlocksStored(first, tuple(run))

    async def answer(self, life: str, number: int, hold_s: float = CACHE_POLL_S) -> tuple[int, bytes]:
        """Returns status and body for a reader that knows everything up to `number` of `life`: once there is news, or
        after `hold_s`. 404 means that this cache is not listed."""
        if self.overflowed:
            return 404, b"{}"
        changed = self._changed
        if life == self._life and number == self._upto:
            try:
                async with asyncio.timeout(hold_s):
                    await changed.wait()
            except TimeoutError:
                pass
        return 200, msgspec.msgpack.encode(self.after(life, number))

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._parents)


def _size(event: BlockEvent) -> int:
    return 1 + (0 if isinstance(event, CacheCleared) else len(event.blocks))


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADER_CHARS = 128
"""Of the name and of the scope of a request; the longest tenant has 64."""
READ_POLL_S = 0.01
"""Interval of checks whether a prompt is read: a batch prompt takes several steps of 20 ms or more."""
KEPT = 4096
"""Finished requests whose usage can still be queried; proxies query within a second."""


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """Tokens of one sequence. Sequences of the same `prompt` (any name) share it; `is_read`: it was computed.
    `dropped_tokens` were generated and are part of no answer. `unread_tokens` are part of a prompt, and in no counter
    of the engine."""

    prompt: str
    prompt_tokens: int
    is_read: bool
    cached_tokens: int = 0
    completion_tokens: int = 0
    dropped_tokens: int = 0
    unread_tokens: int = 0


class Sequence(Protocol):
    def tokens(self) -> SequenceTokens: ...

    @property
    def is_running(self) -> bool: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class Exchange:
    """One request. `usage` is set once nothing of it runs."""

    name: str = ""
    scope: str = ""
    """Limits which prompts in the cache it may find; empty means not stated."""
    sequences: list[Sequence] = field(default_factory=list)
    usage: ExchangeUsage | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_read(self) -> bool:
        """Whether it has prompts and the engine has computed all of them."""
        return bool(self.sequences) and all(each.tokens().is_read for each in self.sequences)

    def prompt_tokens(self) -> int:
        return sum({each.prompt: each.prompt_tokens for each in (s.tokens() for s in self.sequences)}.values())


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def note(sequence: Sequence) -> None:
    if (exchange := _current.get()) is not None:
        exchange.sequences.append(sequence)


def current_exchange() -> str:
    """Returns the name of the request that the engine is answering; empty if it has none."""
    exchange = _current.get()
    return "" if exchange is None else exchange.name


def scoped_salt(given: str | None) -> str | None:
    """Returns the cache salt of the request that the engine is answering, which states the salt `given`. Requests of
    different scopes get different salts, whatever salt they state: it is a hash of both. A scope without a tenant (it
    ends in a colon) adds no salt, so that requests without a key share their blocks."""
    exchange = _current.get()
    scope = "" if exchange is None else exchange.scope
    if not scope or (scope.endswith(":") and not given):
        return given
    return hashlib.sha256(f"{len(scope)}|{scope}|{given or ''}".encode()).hexdigest()


def added(sequences: Iterable[SequenceTokens]) -> tuple[ExchangeUsage, CountedApart]:
    """Returns the usage of a request, and what its engine counts in addition: each prompt once, and everything that was
    generated."""
    read: set[str] = set()
    prompt = cached = completion = again = dropped = 0
    for each in sequences:
        completion += each.completion_tokens
        dropped += each.dropped_tokens
        again -= each.unread_tokens
        if not each.is_read:
            continue
        if each.prompt in read:
            again += each.prompt_tokens
            continue
        read.add(each.prompt)
        prompt += each.prompt_tokens
        cached += each.cached_tokens
    return ExchangeUsage(prompt, cached, completion), CountedApart(again, dropped)


class UsageLedger:
    """The requests of one engine, as middleware around its application. It also serves the changes of the engine's
    prefix `cache`, if they are known."""

    def __init__(self, app: App, cache: CacheLog | None = None) -> None:
        self._app = app
        self.cache = cache
        self._open: dict[str, Exchange] = {}
        self._ended: OrderedDict[str, Exchange] = OrderedDict()
        self._apart = CountedApart(0, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == USAGE_PATH:
            await self._answer_usage(_asked(scope), send)
        elif scope["path"] == READ_PATH:
            await self._answer_read(_asked(scope), send)
        elif scope["path"] == EVENTS_PATH:
            await self._answer_cache(scope, send)
        elif scope["path"] == COUNTED_APART_PATH:
            await _answer(send, 200, msgspec.json.encode(self._apart))
        elif name := _header(scope, EXCHANGE_HEADER):
            await self._open_exchange(name, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _open_exchange(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._open[name] = Exchange(name, _header(scope, CACHE_SCOPE_HEADER))
        token = _current.set(exchange)
        try:
            await self._app(scope, receive, _with_prompt_tokens(exchange, send))
        finally:
            _current.reset(token)
            self._settle(exchange)
            exchange.over.set()
            self._open.pop(name, None)
            self._ended[name] = exchange
            while len(self._ended) > KEPT:
                self._ended.popitem(last=False)

    def _settle(self, exchange: Exchange) -> None:
        if exchange.usage is not None or any(each.is_running for each in exchange.sequences):
            return
        exchange.usage, apart = added(each.tokens() for each in exchange.sequences)
        exchange.sequences = []
        self._apart = CountedApart(
            self._apart.prompt_tokens + apart.prompt_tokens, self._apart.completion_tokens + apart.completion_tokens
        )

    async def _answer_read(self, name: str, send: Send) -> None:
        """Polls, because engines do not signal that a prompt is read. The query may arrive before its request."""
        ends_at = monotonic() + READ_LIMIT_S
        while (exchange := self._open.get(name)) is None or not exchange.is_read:
            if name in self._ended:
                break
            if monotonic() > ends_at:
                await _answer(send, 404 if exchange is None else 202, b"{}")
                return
            await asyncio.sleep(READ_POLL_S)
        await _answer(send, 200, b"{}")

    async def _answer_cache(self, scope: Scope, send: Send) -> None:
        if self.cache is None:
            await _answer(send, 404, b'{"error":"this engine does not list its cache"}')
            return
        query = _query_of(scope)
        after = query.get("after", ["0"])[0]
        status, body = await self.cache.answer(query.get("life", [""])[0], int(after) if after.isdecimal() else 0)
        await _answer(send, status, body)

    async def _answer_usage(self, name: str, send: Send) -> None:
        exchange = self._open.get(name) or self._ended.get(name)
        if exchange is None:
            await _answer(send, 404, b'{"error":"no such exchange"}')
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await exchange.over.wait()
        for sequence in [each for each in exchange.sequences if each.is_running]:
            await sequence.stop()
        self._settle(exchange)
        await _answer(send, 200, msgspec.json.encode(exchange.usage or ExchangeUsage(0, 0, 0)))


def _asked(scope: Scope) -> str:
    return _query_of(scope).get("exchange", [""])[0]


def _query_of(scope: Scope) -> dict[str, list[str]]:
    query: bytes = scope["query_string"]
    return parse_qs(query.decode("latin-1"))


def _header(scope: Scope, wanted: bytes) -> str:
    for name, value in scope["headers"]:
        if name == wanted and len(value) <= MAX_HEADER_CHARS:
            return str(value.decode("latin-1"))
    return ""


def _with_prompt_tokens(exchange: Exchange, send: Send) -> Send:
    """Delays the head of the answer until its first bytes, when the length of the prompts is known."""
    head: MutableMapping[str, Any] | None = None

    async def sending(message: MutableMapping[str, Any]) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
            return
        if head is not None:
            started, head = head, None
            if tokens := exchange.prompt_tokens():
                started["headers"] = [*started.get("headers", ()), (PROMPT_TOKENS_HEADER, b"%d" % tokens)]
            await send(started)
        await send(message)

    return sending


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
