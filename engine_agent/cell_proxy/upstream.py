"""Connections to the engine: one request at a time each, kept alive and used again. It carries bytes and reports what
happened; it never repeats a request and never judges the engine."""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from time import monotonic
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from engine_agent.cell_proxy.wire import Headers, ResponseHead, length_of


class UpstreamFault(StrEnum):
    """How a connection to the engine failed in the middle of a request."""

    CLOSED = "closed"
    MALFORMED = "malformed"


class Receiver(Protocol):
    """Who waits for the answer on a connection."""

    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        """The bytes of one read: `head` with the first of them, `complete` with the last."""

    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        """The connection is gone before the answer was complete."""


class EngineConnection(asyncio.Protocol):
    """One keep-alive connection to the engine."""

    def __init__(self, pool: "EnginePool") -> None:
        self.receiver: Receiver | None = None
        self.used_before = False
        self.idle_since = 0.0
        self._pool = pool
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._headers: Headers = []
        self._reason = b""
        self._head: ResponseHead | None = None
        self._new_head: ResponseHead | None = None
        self._body: list[bytes] = []
        self._complete = False
        self._keep_alive = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- towards the engine ---

    def write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if self.usable:
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        if self.usable:
            cast(asyncio.Transport, self._transport).resume_reading()

    def release(self) -> None:
        """The answer is complete: the connection may serve another request, unless either side wants it closed."""
        self.receiver = None
        if self._keep_alive and self.usable:
            self.used_before = True
            self._reset()
            self.resume_reading()
            self._pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Cut the connection at once, whereupon the engine stops what it generates for it."""
        self.receiver = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.receiver is None or self._parser is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(UpstreamFault.MALFORMED, str(error) or type(error).__name__)
            return
        head, self._new_head = self._new_head, None
        body, self._body = b"".join(self._body), []
        if head is not None or body or self._complete:
            self.receiver.upstream_received(head, body, complete=self._complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._parser = None
        self._pool.lost(self)
        if self.receiver is None:
            return
        if exc is None and self._head is not None and self._head.until_close:
            self._complete = True
            self.receiver.upstream_received(None, b"", complete=True)
        else:
            self._fail(UpstreamFault.CLOSED, str(exc) if exc else "it closed the connection")

    def _fail(self, fault: UpstreamFault, reason: str) -> None:
        receiver = self.receiver
        self.abort()
        if receiver is not None:
            receiver.upstream_failed(fault, reason)

    # --- HttpResponseParser ---

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("bytes after the end of the answer")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = cast(HttpResponseParser, self._parser).get_status_code()
        if 100 <= status < 200:
            return
        named = dict(self._headers)
        self._head = self._new_head = ResponseHead(
            status=status,
            reason=self._reason,
            headers=self._headers,
            content_length=length_of(named),
            chunked=b"transfer-encoding" in named,
            is_stream=named.get(b"content-type", b"").startswith(b"text/event-stream"),
        )

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        if self._head is None:  # an interim answer (1xx): the real one follows
            self._headers, self._reason = [], b""
            return
        self._complete = True
        self._keep_alive = cast(HttpResponseParser, self._parser).should_keep_alive()


class EnginePool:
    """The connections to one engine. `on_lost` is called for every idle one that the engine closed: it may have
    died."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_s: float,
        idle_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.host_header = f"{host}:{port}".encode()
        self._address = (host, port)
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._on_lost = on_lost
        self._idle: deque[EngineConnection] = deque()

    def take(self) -> EngineConnection | None:
        """An idle connection, the one used last, or None when there is none."""
        oldest_s = monotonic() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> EngineConnection:
        """Open a new connection.

        Raises:
            OSError: refused, or not connected within the limit (TimeoutError).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(lambda: EngineConnection(self), *self._address)
        return connection

    def put(self, connection: EngineConnection) -> None:
        """Keep a connection whose answer is complete."""
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def lost(self, connection: EngineConnection) -> None:
        """A connection has closed; an idle one that closed by itself is news."""
        if connection in self._idle:
            self._idle.remove(connection)
            self._on_lost()

    def sweep(self, now: float) -> None:
        """Close the connections that were idle for too long."""
        while self._idle and self._idle[0].idle_since <= now - self._idle_s:
            self._idle.popleft().abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
