"""What an engine computed for each request of its cell proxy, whatever becomes of that: a part of the engine's HTTP.

The proxy names a request (`x-switchyard-exchange`). Whatever the engine computes while that is answered is noted under
the name, so that `GET /switchyard/usage?exchange=NAME` says exactly what a request used whose answer nobody read to its
end. It says so once the answer is over, for until then more may be computed; what still runs by then is stopped. A
request that nobody asks about costs a note per sequence, and nothing per token. Bound to loopback with its engine.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec

from engine_agent.engines.cache_log import CacheLog
from engine_agent.protocol.proxy_messages import (
    CACHE_SCOPE_HEADER,
    COUNTED_APART_PATH,
    END_LIMIT_S,
    EVENTS_PATH,
    EXCHANGE_HEADER,
    PROMPT_TOKENS_HEADER,
    READ_LIMIT_S,
    READ_PATH,
    USAGE_PATH,
    CountedApart,
    ExchangeUsage,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADER_CHARS = 128
"""Of the name of a request, and of its scope: the longest tenant has 64."""
LOOK_EVERY_S = 0.01
"""Of a question whether a prompt is read: a batch prompt takes some steps, of 20 ms or more each."""
KEPT = 4096
"""Requests that have ended and can still be asked about; whoever asks does so within a second."""


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """Tokens of one sequence. Sequences of one `prompt` (any name for it) share that; `is_read`: it was computed.
    `dropped_tokens` were generated and belong to no answer."""

    prompt: str
    prompt_tokens: int
    is_read: bool
    cached_tokens: int = 0
    completion_tokens: int = 0
    dropped_tokens: int = 0


class Sequence(Protocol):
    def tokens(self) -> SequenceTokens: ...

    @property
    def is_running(self) -> bool: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class Exchange:
    """One request. `usage` is kept when nothing of it runs any more."""

    name: str = ""
    scope: str = ""
    """Whose prompts in the cache it may find; empty: not said."""
    sequences: list[Sequence] = field(default_factory=list)
    usage: ExchangeUsage | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_read(self) -> bool:
        """Whether it has prompts, and the engine has read them."""
        return bool(self.sequences) and all(each.tokens().is_read for each in self.sequences)

    def prompt_tokens(self) -> int:
        return sum({each.prompt: each.prompt_tokens for each in (s.tokens() for s in self.sequences)}.values())


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def note(sequence: Sequence) -> None:
    """The engine begins a sequence for the request that it is answering."""
    if (exchange := _current.get()) is not None:
        exchange.sequences.append(sequence)


def current_exchange() -> str:
    """The name of the request that the engine is answering; empty: it has none."""
    exchange = _current.get()
    return "" if exchange is None else exchange.name


def scoped_salt(given: str | None) -> str | None:
    """The salt of the blocks of the request that the engine is answering, which itself asks for the salt `given`.

    Whoever has another scope has another salt, whatever salt he asks for: it is a hash of both. A scope that is
    nobody's (it ends in a colon) adds none by itself, so that what needs no key shares its blocks as ever.
    """
    exchange = _current.get()
    scope = "" if exchange is None else exchange.scope
    if not scope or (scope.endswith(":") and not given):
        return given
    return hashlib.sha256(f"{len(scope)}|{scope}|{given or ''}".encode()).hexdigest()


def added(sequences: Iterable[SequenceTokens]) -> tuple[ExchangeUsage, CountedApart]:
    """Usage of a request, and what its engine counts beside it: each prompt once, and all that was generated."""
    read: set[str] = set()
    prompt = cached = completion = again = dropped = 0
    for each in sequences:
        completion += each.completion_tokens
        dropped += each.dropped_tokens
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
    """The exchanges of one engine, around its application. It also says what is in the engine's prefix `cache`, where
    that is known."""

    def __init__(self, app: App, cache: CacheLog | None = None) -> None:
        self._app = app
        self.cache = cache
        self._open: dict[str, Exchange] = {}
        self._ended: OrderedDict[str, Exchange] = OrderedDict()
        self._apart = CountedApart(0, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a question about usage, or note what is computed while the engine answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == USAGE_PATH:
            await self._tell(_asked(scope), send)
        elif scope["path"] == READ_PATH:
            await self._tell_read(_asked(scope), send)
        elif scope["path"] == EVENTS_PATH:
            await self._tell_cache(scope, send)
        elif scope["path"] == COUNTED_APART_PATH:
            await _answer(send, 200, msgspec.json.encode(self._apart))
        elif name := _header(scope, EXCHANGE_HEADER):
            await self._note(name, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _note(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def _tell_read(self, name: str, send: Send) -> None:
        """Looked at from time to time: engines call nobody when a prompt is read. The question may be here before what
        it is about."""
        ends_at = monotonic() + READ_LIMIT_S
        while (exchange := self._open.get(name)) is None or not exchange.is_read:
            if name in self._ended:
                break
            if monotonic() > ends_at:
                await _answer(send, 404 if exchange is None else 202, b"{}")
                return
            await asyncio.sleep(LOOK_EVERY_S)
        await _answer(send, 200, b"{}")

    async def _tell_cache(self, scope: Scope, send: Send) -> None:
        if self.cache is None:
            await _answer(send, 404, b'{"error":"this engine does not say what is in its cache"}')
            return
        query = _query_of(scope)
        after = query.get("after", ["0"])[0]
        status, body = await self.cache.answer(query.get("life", [""])[0], int(after) if after.isdecimal() else 0)
        await _answer(send, status, body)

    async def _tell(self, name: str, send: Send) -> None:
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
    """Hold the head of the answer until its first bytes: then it is known how long the prompts are."""
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
