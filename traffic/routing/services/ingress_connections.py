"""Connections to ingresses that carry one POST after another, because TCP and TLS cost more than a short request. Each
event loop has its own. A connection is closed once it was idle for `IDLE_S`, well below the ingress's own limit. No
request uses it after `LONGEST_S`, so that a revoked certificate is seen. Cancelling a request closes its connection,
which stops the engine's work."""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import cast
from weakref import WeakKeyDictionary

import httptools

IDLE_S = 2.0
SWEEP_S = 0.5
"""Interval of checks for idle connections: one timer for all costs less than one for each request."""
LONGEST_S = 60.0
MOST_IDLE = 256
"""Of one address."""
MOST_HEAD_BYTES = 64 * 1024


class NotConnected(Exception):
    """Nothing was sent."""


class BrokenOff(Exception):
    """The response is incomplete or malformed; the text says how."""


class TooLong(Exception):
    """The response is longer than allowed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to connect. `tls` is None for plain links; the server's certificate must have `name`."""

    address: str
    port: int
    tls: ssl.SSLContext | None = None
    name: str | None = None


class WholeResponse:
    """A response that is complete. Its headers are decoded only if they are read."""

    __slots__ = ("body", "headers", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    def header(self, name: bytes) -> str:
        """Returns the last header of this name, which is in lower case; empty if there is none."""
        return next((value.decode("latin-1") for known, value in reversed(self.headers) if known.lower() == name), "")


async def whole_response(
    place: Place,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    limit_s: float,
    connect_s: float,
    max_bytes: int,
) -> WholeResponse:
    """Posts a body and reads the whole response. Raises NotConnected, BrokenOff or TooLong, and TimeoutError if it is
    not complete within `limit_s`."""
    loop = asyncio.get_running_loop()
    idle = _idle.get(loop)
    if idle is None:
        idle = _idle[loop] = _Idle()
    connection = idle.take(place)
    if connection is None:
        began_s = monotonic()
        connection = await _connect(place, min(connect_s, limit_s))
        limit_s -= monotonic() - began_s
    response = await connection.exchange(_request(place, path, body, headers), limit_s, max_bytes)
    if connection.is_reusable:
        idle.keep(place, connection)
    else:
        connection.close()
    return response


def _request(place: Place, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    stated = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if stated.count("\r") != len(headers) or stated.count("\n") != len(headers) or "\0" in stated:
        raise ValueError("a header has a line break")
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (_opening(place, path), stated.encode("latin-1"), len(body), body)


@lru_cache(maxsize=256)
def _opening(place: Place, path: str) -> bytes:
    if any(letter in path for letter in " \r\n\0"):
        raise ValueError("a path has a blank or a line break")
    host = f"[{place.address}]" if ":" in place.address else place.address
    return f"POST {path} HTTP/1.1\r\nHost: {host}:{place.port}\r\nContent-Type: application/json\r\n".encode("ascii")


class _Idle:
    """The idle connections of one event loop. The last one that became idle is used first."""

    def __init__(self) -> None:
        self._places: dict[Place, deque[_Connection]] = {}
        self._is_sweeping = False

    def take(self, place: Place) -> "_Connection | None":
        idle = self._places.get(place)
        while idle:
            connection = idle.pop()
            if connection.is_reusable and monotonic() - connection.idle_since_s < IDLE_S:
                return connection
            connection.close()
        return None

    def keep(self, place: Place, connection: "_Connection") -> None:
        idle = self._places.get(place)
        if idle is None:
            idle = self._places[place] = deque()
        if len(idle) >= MOST_IDLE:
            connection.close()
            return
        connection.idle_since_s = monotonic()
        idle.append(connection)
        if not self._is_sweeping:
            self._sweep_later()

    def _sweep(self) -> None:
        oldest_s = monotonic() - IDLE_S
        for place, idle in tuple(self._places.items()):
            while idle and idle[0].idle_since_s <= oldest_s:
                idle.popleft().close()
            if not idle:
                del self._places[place]
        self._is_sweeping = False
        if self._places:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._is_sweeping = True
        asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


_idle: WeakKeyDictionary[asyncio.AbstractEventLoop, _Idle] = WeakKeyDictionary()


async def _connect(place: Place, connect_s: float) -> "_Connection":
    try:
        async with asyncio.timeout(connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, place.address, place.port, ssl=place.tls, server_hostname=place.name if place.tls else None
            )
    except TimeoutError as error:
        raise NotConnected(f"no connection within {connect_s:.3g} s") from error
    except (OSError, ssl.CertificateError) as error:
        raise NotConnected(str(error) or type(error).__name__) from error
    return connection


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self._made_s = monotonic()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[WholeResponse] | None = None
        self._response = WholeResponse()
        self._most_bytes = self._head_bytes = 0
        self._has_head = False
        self._keeps_alive = False
        self._parser = httptools.HttpResponseParser(self)
        self.idle_since_s = 0.0

    @property
    def is_reusable(self) -> bool:
        return self._keeps_alive and self._is_open and monotonic() - self._made_s < LONGEST_S

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, limit_s: float, max_bytes: int) -> WholeResponse:
        """Raises BrokenOff, TooLong or TimeoutError. The connection is closed then, and if this is cancelled."""
        if self._transport is None or self._transport.is_closing():
            raise BrokenOff("Server disconnected before the request")
        self._response, self._most_bytes, self._head_bytes = WholeResponse(), max_bytes, 0
        self._has_head = self._keeps_alive = False
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        limit = loop.call_later(max(0.0, limit_s), self._fail, TimeoutError())
        self._transport.write(request)
        try:
            return await self._waiting
        except BaseException:
            self.close()
            raise
        finally:
            limit.cancel()
            self._waiting = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self._keeps_alive = False  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, TooLong) as error:
            cause = error.__context__ if isinstance(error.__context__, TooLong) else error
            self._fail(cause if isinstance(cause, TooLong) else BrokenOff(str(error) or type(error).__name__))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._has_head and exc is None and self._ends_with_connection:
            self._done()
            return
        text = "peer closed connection before the end" if self._has_head else "Server disconnected without a response"
        self._fail(BrokenOff(str(exc) if exc is not None else text))

    @property
    def _ends_with_connection(self) -> bool:
        return not any(name.lower() in {b"content-length", b"transfer-encoding"} for name, _ in self._response.headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEAD_BYTES:
            raise TooLong
        self._response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        self._has_head = self._response.status >= 200

    def on_body(self, piece: bytes) -> None:
        self._response.body += piece
        if len(self._response.body) > self._most_bytes:
            raise TooLong

    def on_message_complete(self) -> None:
        if not self._has_head:
            self._response = WholeResponse()  # an interim response, such as 100
            return
        self._keeps_alive = self._parser.should_keep_alive()
        self._done()

    def _done(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
