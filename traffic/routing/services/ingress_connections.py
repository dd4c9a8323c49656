"""Connections to ingresses that carry one POST after another, because TCP and TLS cost more than a short request. Each
event loop has its own. An idle connection is kept for `IDLE_S`, well below the ingress's own limit, and none for longer
than `LONGEST_S`, so that a revoked certificate is seen. Cancelling a request closes its connection, which stops the
engine's work."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import cast
from weakref import WeakKeyDictionary

import httptools

IDLE_S = 2.0
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


@dataclass(slots=True)
class WholeResponse:
    """Header names are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


_idle: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Place, list[_Connection]]]" = WeakKeyDictionary()


async def whole_response(
    place: Place, path: str, body: bytes, headers: Mapping[str, str], *, connect_s: float, max_bytes: int
) -> WholeResponse:
    """Posts a body and reads the whole response. Raises NotConnected, BrokenOff or TooLong."""
    connection = _take_idle(place) or await _connect(place, connect_s)
    response = await connection.exchange(_request(place, path, body, headers), max_bytes)
    if connection.is_reusable:
        _keep(place, connection)
    else:
        connection.close()
    return response


def _request(place: Place, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    host = f"[{place.address}]" if ":" in place.address else place.address
    fixed = {"Host": f"{host}:{place.port}", "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in {**headers, **fixed}.items()]
    if any(letter in line for line in lines for letter in "\r\n\0"):
        raise ValueError("a header has a line break")
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def _take_idle(place: Place) -> "_Connection | None":
    idle = _idle.get(asyncio.get_running_loop(), {}).get(place, [])
    while idle:
        connection = idle.pop()
        if connection.is_fresh:
            return connection
        connection.close()
    return None


def _keep(place: Place, connection: "_Connection") -> None:
    loop = asyncio.get_running_loop()
    idle = _idle.setdefault(loop, {}).setdefault(place, [])
    if len(idle) >= MOST_IDLE:
        connection.close()
        return
    connection.idle_since_s = monotonic()
    idle.append(connection)
    connection.expiry = loop.call_later(IDLE_S, connection.close)


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
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def is_reusable(self) -> bool:
        return self._keeps_alive and self._is_open and monotonic() - self._made_s < LONGEST_S

    @property
    def is_fresh(self) -> bool:
        """Whether an idle connection may be used again."""
        if self.expiry is not None:
            self.expiry.cancel()
        return self.is_reusable and monotonic() - self.idle_since_s < IDLE_S

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, max_bytes: int) -> WholeResponse:
        """Raises BrokenOff or TooLong. The connection is closed then, and if this is cancelled."""
        if self._transport is None or self._transport.is_closing():
            raise BrokenOff("Server disconnected before the request")
        self._response, self._most_bytes, self._head_bytes = WholeResponse(), max_bytes, 0
        self._has_head = self._keeps_alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiting
        except BaseException:
            self.close()
            raise
        finally:
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
        return not {"content-length", "transfer-encoding"} & self._response.headers.keys()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEAD_BYTES:
            raise TooLong
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

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
