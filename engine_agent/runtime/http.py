"""One small HTTP request to a process of this node, with a limit on everything. It follows no redirect and keeps no
connection; the agent needs no more, and a whole client would double its memory."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_RESPONSE_BYTES = 256 * 1024


class NoResponse(Exception):
    """The process did not answer; the text says how. `refused`: nothing listens there."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Status and body of an answer."""

    status: int
    body: bytes


async def request(method: str, url: str, *, timeout_s: float, body: bytes = b"") -> HttpResponse:
    """Send one request, with a JSON body if there is one, and return the whole answer.

    Raises:
        NoResponse: nothing listens, no whole answer within `timeout_s`, more than `MAX_RESPONSE_BYTES`, or not HTTP.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _request(method, url, body)
    except TimeoutError as error:
        raise NoResponse(f"{url} did not answer within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise NoResponse(f"nothing listens at {url}", refused=True) from error
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise NoResponse(f"{url}: {str(error) or type(error).__name__}") from error


async def _request(method: str, url: str, body: bytes) -> HttpResponse:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        head = [f"{method} {parts.path or '/'} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join((*head, "", "")).encode() + body)
        await writer.drain()
        return await _read_response(reader)
    finally:
        writer.close()


async def _read_response(reader: asyncio.StreamReader) -> HttpResponse:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not an HTTP answer: {head[0][:80]!r}")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if "transfer-encoding" in fields:
        raise ValueError("the answer is chunked; processes of a node answer with a length")
    status = int(rest[:3])
    if "content-length" not in fields:
        return HttpResponse(status, await _read_to_end(reader))
    length = int(fields["content-length"])
    if length > MAX_RESPONSE_BYTES:
        raise ValueError(f"the answer of {length} bytes is longer than {MAX_RESPONSE_BYTES}")
    return HttpResponse(status, await reader.readexactly(length))


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while piece := await reader.read(MAX_RESPONSE_BYTES):
        content += piece
        if len(content) > MAX_RESPONSE_BYTES:
            raise ValueError(f"the answer is longer than {MAX_RESPONSE_BYTES} bytes")
    return bytes(content)
