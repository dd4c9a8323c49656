"""Small HTTP requests to processes of this node, with limits on everything, over kept connections: a node polls its
processes several times per second. It follows no redirects. A complete client would double the agent's memory."""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

MAX_RESPONSE_BYTES = 256 * 1024


class NoResponse(Exception):
    """The process did not answer; the text says how. `refused`: nothing listens there."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """Keeps idle connections: as many per address as requests ran there concurrently. `context`: for `https`, whose
    server must have a certificate for `server_name`. `headers`: lines that every request has."""

    def __init__(
        self, context: Callable[[], ssl.SSLContext] | None = None, server_name: str = "", headers: tuple[str, ...] = ()
    ) -> None:
        self._context, self._server_name, self._headers = context, server_name, headers
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)

    async def request(self, method: str, url: str, *, timeout_s: float, body: bytes = b"") -> HttpResponse:
        """Sends one request, with a JSON body if there is one, and returns the complete answer. It is sent again if a
        kept connection ends without an answer, as happens when the process has been replaced. Raises NoResponse if
        nothing listens, or if no complete HTTP answer of at most `MAX_RESPONSE_BYTES` arrives within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._request(method, urlsplit(url), body)
        except TimeoutError as error:
            raise NoResponse(f"{url} did not answer within {timeout_s:g} s") from error
        except ConnectionRefusedError as error:
            raise NoResponse(f"nothing listens at {url}", refused=True) from error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise NoResponse(f"{url}: {str(error) or type(error).__name__}") from error

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
        self._idle.clear()

    async def _request(self, method: str, url: SplitResult, body: bytes) -> HttpResponse:
        if kept := self._idle[url.netloc]:
            try:
                return await self._exchange(kept.pop(), method, url, body)
            except _EmptyAnswer:
                pass
        tls, name = (self._context(), self._server_name) if self._context else (None, None)
        streams = await asyncio.open_connection(url.hostname, url.port or 80, ssl=tls, server_hostname=name)
        connection = _Connection(*streams)
        return await self._exchange(connection, method, url, body)

    async def _exchange(self, connection: _Connection, method: str, url: SplitResult, body: bytes) -> HttpResponse:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        head = [f"{method} {target} HTTP/1.1", f"Host: {url.netloc}", *self._headers]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        is_reusable = False
        try:
            connection.writer.write("\r\n".join((*head, "", "")).encode() + body)
            response, is_reusable = await _read_response(connection.reader)
            return response
        finally:
            if is_reusable:
                self._idle[url.netloc].append(connection)
            else:
                connection.writer.close()


class _EmptyAnswer(EOFError):
    """The connection ended before the first byte of an answer."""


async def _read_response(reader: asyncio.StreamReader) -> tuple[HttpResponse, bool]:
    head = (await _read_head(reader)).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not an HTTP answer: {head[0][:80]!r}")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if "transfer-encoding" in fields:
        raise ValueError("the answer is chunked; processes of a node answer with a length")
    status = int(rest[:3])
    if "content-length" not in fields:
        return HttpResponse(status, await _read_to_end(reader)), False
    length = int(fields["content-length"])
    if length > MAX_RESPONSE_BYTES:
        raise ValueError(f"the answer of {length} bytes is longer than {MAX_RESPONSE_BYTES}")
    is_kept = version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
    return HttpResponse(status, await reader.readexactly(length)), is_kept


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise _EmptyAnswer("the connection ended without an answer") from error
        raise
    except ConnectionError as error:
        raise _EmptyAnswer(str(error)) from error


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while piece := await reader.read(MAX_RESPONSE_BYTES):
        content += piece
        if len(content) > MAX_RESPONSE_BYTES:
            raise ValueError(f"the answer is longer than {MAX_RESPONSE_BYTES} bytes")
    return bytes(content)
