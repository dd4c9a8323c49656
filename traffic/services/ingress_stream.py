"""Asks an ingress one question over HTTP/1.1 and hands on the answer while it arrives, within bounds. It decides
nothing; when its reader stops, its connection is cut, and with that the cell's engine stops."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from httptools import HttpParserError, HttpResponseParser

from traffic.services.ingress_http import CONNECT_LIMIT_S, post_bytes

_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`first_s`: until the answer begins, queueing included; `silent_s`: between two pieces of it; `whole_s`: all."""

    first_s: float = 60.0
    silent_s: float = 30.0
    whole_s: float = 300.0
    max_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer begins with. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


class StreamBroken(Exception):
    """No whole answer; the text says why."""


class _Parsed:
    """What the parser has read and nobody has taken yet."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.has_head = False
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True


async def stream_ingress(
    address: tuple[str, int], path: str, body: bytes, headers: Mapping[str, str], limits: StreamLimits
) -> AsyncGenerator[Head | bytes, None]:
    """POST a JSON body. The head comes first, then the body in pieces.

    Raises:
        StreamBroken: the ingress cannot be reached, is silent for too long, or breaks off.
    """
    where = f"the ingress at {address[0]}:{address[1]}"
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(*address)
    except OSError as error:
        raise StreamBroken(f"{where} cannot be reached: {str(error) or 'no answer'}") from None
    try:
        writer.write(post_bytes(address, path, body, headers))
        async with aclosing(_parts(reader, limits)) as parts:
            async for part in parts:
                yield part
    except (OSError, HttpParserError) as error:
        raise StreamBroken(f"the answer broke off: {str(error) or type(error).__name__}") from None
    finally:
        writer.transport.abort()


async def _parts(reader: asyncio.StreamReader, limits: StreamLimits) -> AsyncGenerator[Head | bytes, None]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + limits.whole_s
    parsed = _Parsed()
    parser = HttpResponseParser(parsed)
    has_begun, read_bytes = False, 0
    while not parsed.complete:
        # Not one timeout around it all: it would end whoever reads this, in the middle of something else.
        left_s = ends_at - clock()
        piece = await _piece(reader, min(left_s, limits.silent_s if has_begun else limits.first_s))
        if not piece:
            raise StreamBroken("the ingress closed the connection before the answer was whole")
        parser.feed_data(piece)
        read_bytes += len(piece)
        if read_bytes > limits.max_bytes:
            raise StreamBroken(f"the answer is longer than {limits.max_bytes} bytes")
        if parsed.has_head and not has_begun:
            has_begun = True
            yield Head(parser.get_status_code(), parsed.headers)
        while parsed.pieces:
            yield parsed.pieces.pop(0)


async def _piece(reader: asyncio.StreamReader, limit_s: float) -> bytes:
    try:
        async with asyncio.timeout(limit_s):
            return await reader.read(_PIECE_BYTES)
    except TimeoutError:
        raise StreamBroken(f"nothing more came within {max(0.0, limit_s):.3g} s") from None
