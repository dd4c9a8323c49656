"""Asks an ingress one question over HTTP/1.1 and waits for the whole answer, within bounds. It tells what happened and
decides nothing; when it is cancelled, its connection is cut, and with that the cell's engine stops."""

import asyncio
from collections.abc import Mapping

from httptools import HttpParserError, HttpResponseParser

from traffic.planning.async_request import Received

CONNECT_LIMIT_S = 3.0
_PIECE_BYTES = 64 * 1024


class _Answer:
    """What the parser has read so far."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False
        self.retry_after_s: float | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = float(value[:6])

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True


async def ask_ingress(
    address: tuple[str, int], path: str, body: bytes, headers: Mapping[str, str], *, limit_s: float, max_bytes: int
) -> Received:
    """POST a JSON body. Never raises for what the other side does."""
    try:
        async with asyncio.timeout(min(CONNECT_LIMIT_S, limit_s)):
            reader, writer = await asyncio.open_connection(*address)
    except OSError as error:
        return Received(None, sent=False, reason=f"the ingress at {address[0]}:{address[1]} cannot be reached: {error}")
    try:
        async with asyncio.timeout(limit_s):
            writer.write(post_bytes(address, path, body, headers))
            await writer.drain()
            return await _read(reader, max_bytes)
    except TimeoutError:
        return Received(None, reason=f"no whole answer within {limit_s:.3g} s")
    except (OSError, HttpParserError) as error:
        return Received(None, reason=f"the answer broke off: {str(error) or type(error).__name__}")
    finally:
        writer.transport.abort()


def post_bytes(address: tuple[str, int], path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A POST of JSON on a connection of its own."""
    fixed = {
        "Host": f"{address[0]}:{address[1]}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**headers, **fixed}.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> Received:
    answer = _Answer()
    parser = HttpResponseParser(answer)
    while not answer.complete:
        piece = await reader.read(_PIECE_BYTES)
        if not piece:
            return Received(None, reason="the ingress closed the connection before the answer was whole")
        parser.feed_data(piece)
        if len(answer.body) > max_bytes:
            return Received(None, reason=f"the answer is longer than {max_bytes} bytes")
    return Received(parser.get_status_code(), bytes(answer.body), retry_after_s=answer.retry_after_s)
