"""Connections to the engine, kept alive and reused, with one request at a time each; and `call`, one request of the
proxy itself with limits on time and length. Carries bytes and reports what happened. It never repeats a client's
request and never evaluates the engine."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from engine_agent.cell_proxy.rewrite import Upload
from engine_agent.cell_proxy.wire import Headers, RequestHead, ResponseHead, length_of


class UpstreamFault(StrEnum):
    """How a connection to the engine failed during a request."""

    CLOSED = "closed"
    MALFORMED = "malformed"


class Receiver(Protocol):
    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        """The bytes of one read. `head` comes with the first, `complete` with the last."""

    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        """The connection ended before the answer was complete."""


class EngineConnection(asyncio.Protocol):
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
        """The answer is complete: keeps the connection for another request, unless either side wants to close it."""
        self.receiver = None
        if self._keep_alive and self.usable:
            self.used_before = True
            self._reset()
            self.resume_reading()
            self._pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
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
        if self._head is None:  # an interim answer (1xx): the final one follows
            self._headers, self._reason = [], b""
            return
        self._complete = True
        self._keep_alive = cast(HttpResponseParser, self._parser).should_keep_alive()


class EnginePool:
    """The connections to one engine. `on_lost` is called for each idle one that the engine closed: it may have died."""

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
        """The idle connection that was used last; None if there is none."""
        oldest_s = monotonic() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> EngineConnection:
        """Opens a new connection. Raises OSError if the connection is refused, or not connected within the limit
        (TimeoutError)."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(lambda: EngineConnection(self), *self._address)
        return connection

    def put(self, connection: EngineConnection) -> None:
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def lost(self, connection: EngineConnection) -> None:
        """A connection has closed. `on_lost` is called if it was idle."""
        if connection in self._idle:
            self._idle.remove(connection)
            self._on_lost()

    def sweep(self, now: float) -> None:
        while self._idle and self._idle[0].idle_since <= now - self._idle_s:
            self._idle.popleft().abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()


_MAX_ANSWER_BYTES = 64 * 1024
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class CallResponse:
    status: int
    body: bytes
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


class CallFailed(ConnectionError):
    """The engine cannot be reached, or its answer is invalid; the text says which."""


class _Collector:
    def __init__(self, future: "asyncio.Future[CallResponse]", max_bytes: int) -> None:
        self._future = future
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        if head is not None:
            self._status, self._headers = head.status, dict(head.headers)
        self._body += body
        if self._future.done():
            return
        if complete:
            self._future.set_result(CallResponse(self._status, bytes(self._body), self._headers))
        elif len(self._body) > self._max_bytes:
            self._future.set_exception(CallFailed(f"an answer of more than {self._max_bytes} bytes"))

    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        if not self._future.done():
            self._future.set_exception(CallFailed(f"connection {fault}: {reason}"))


async def call(
    pool: EnginePool,
    method: bytes,
    target: bytes,
    body: bytes | None,
    timeout_s: float,
    *,
    max_bytes: int = _MAX_ANSWER_BYTES,
    own: Headers | None = None,
    request_id: bytes = b"probe",
) -> CallResponse:
    """Sends one request of the proxy and waits for its whole answer, of at most `max_bytes`. `own`: its headers. Raises
    TimeoutError without a whole answer within `timeout_s`. Raises OSError if the connection is refused or broken
    (`CallFailed`)."""
    headers = [*([] if body is None else [_JSON]), *(own or ())]
    length = None if body is None else len(body)
    head = RequestHead(method, target, [], True, True, length, False, False, request_id)
    async with asyncio.timeout(timeout_s):
        while (connection := pool.take()) is not None:
            try:
                return await _send(connection, pool, head, headers, body, max_bytes)
            except CallFailed:
                continue  # the engine had closed it while idle; a new one shows what is wrong
        return await _send(await pool.connect(), pool, head, headers, body, max_bytes)


async def _send(
    connection: EngineConnection, pool: EnginePool, head: RequestHead, own: Headers, body: bytes | None, max_bytes: int
) -> CallResponse:
    upload = Upload(head, repeat_limit_bytes=0)
    upload.headers = own
    upload.add(body or b"", complete=True)
    future: asyncio.Future[CallResponse] = asyncio.get_running_loop().create_future()
    connection.receiver = _Collector(future, max_bytes)
    connection.write(upload.opening(pool.host_header))
    try:
        response = await future
    except BaseException:
        connection.abort()
        raise
    connection.release()
    return response
