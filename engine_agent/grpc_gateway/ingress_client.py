"""Sends HTTP requests to the ingress's own HAProxy, over a socket that is a file. Each request has a connection, which
begins with the client's address (PROXY protocol, version 1): HAProxy counts and logs the client, not the gateway.
Closing the connection cancels the request, at HAProxy and at the cell."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httptools

MOST_ANSWER_BYTES: Final = 32 * 1024 * 1024
READ_BYTES: Final = 64 * 1024
Source = tuple[str, int]
"""Address and port of a client."""


class NoAnswer(Exception):
    """The ingress cannot be reached, or its answer broke off."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def encoded(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", "host: ingress", "connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(self.body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


class HttpAnswer:
    """An answer whose head has arrived."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_head = self._is_complete = False
        self.headers: dict[str, str] = {}
        self.status = 0

    async def read_head(self) -> None:
        while not self._has_head:
            await self._read_more()
        self.status = self._parser.get_status_code()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises NoAnswer if it breaks off."""
        while True:
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                yield data
            elif self._is_complete:
                return
            else:
                await self._read_more()

    async def body(self) -> bytes:
        """The whole body. Raises NoAnswer if it breaks off or is longer than `MOST_ANSWER_BYTES`."""
        parts, length = list[bytes](), 0
        async for part in self.parts():
            length += len(part)
            if length > MOST_ANSWER_BYTES:
                raise NoAnswer(f"the answer has more than {MOST_ANSWER_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _read_more(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise NoAnswer(f"the connection to the ingress broke: {error}") from error
        if not data:
            raise NoAnswer("the connection to the ingress ended within an answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise NoAnswer(f"the answer is not HTTP: {error}") from None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True


class IngressClient:
    """`socket`: the file where HAProxy takes the gateway's requests."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    @contextlib.asynccontextmanager
    async def send(self, request: HttpRequest, source: Source | None = None) -> AsyncIterator[HttpAnswer]:
        """Sends a request; the answer can be read within the block. `source`: the client; None: the gateway itself.
        Raises NoAnswer if there is none."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=READ_BYTES)
        except OSError as error:
            raise NoAnswer(f"the ingress is not reachable: {error}") from error
        try:
            writer.write(proxy_line(source) + request.encoded())
            with contextlib.suppress(OSError):  # it may have answered before it read everything
                await writer.drain()
            answer = HttpAnswer(reader)
            await answer.read_head()
            yield answer
        finally:
            writer.transport.abort()

    async def get(self, target: str, headers: Iterable[tuple[str, str]] = ()) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a short answer. Raises NoAnswer."""
        async with self.send(HttpRequest("GET", target, tuple(headers))) as answer:
            return answer.status, answer.headers, await answer.body()


def proxy_line(source: Source | None) -> bytes:
    """The first line of a connection: https://www.haproxy.org/download/2.8/doc/proxy-protocol.txt."""
    if source is None:
        return b"PROXY UNKNOWN\r\n"
    address = ipaddress.ip_address(source[0])
    family, local = ("TCP4", "127.0.0.1") if address.version == 4 else ("TCP6", "::1")
    return f"PROXY {family} {address} {local} {source[1]} 0\r\n".encode()
