"""Raw HTTP/1.1 for tests: reads messages exactly as framed, without a client library."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Message:
    """A request or an answer: first line, headers by lower-case name, body without framing."""

    first_line: str
    headers: dict[str, str]
    body: bytes
    pieces: list[bytes]
    """The chunks as they were framed; the whole body where it was not chunked."""
    whole: bool = True
    """Whether the body was complete before the connection closed."""

    @property
    def status(self) -> int:
        return int(self.first_line.split()[1])

    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """First line and headers.

    Raises:
        asyncio.IncompleteReadError: closed before the end of the head.
    """
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if line)
    return lines[0], {name.lower(): value.strip() for name, value in pairs}


async def read_message(reader: asyncio.StreamReader) -> Message:
    """One message, complete or as far as it arrived."""
    return await read_body(reader, *await read_head(reader))


async def read_body(reader: asyncio.StreamReader, first_line: str, headers: dict[str, str]) -> Message:
    """The message that began with this head."""
    pieces: list[bytes] = []
    try:
        if headers.get("transfer-encoding") == "chunked":
            while piece := await read_chunk(reader):
                pieces.append(piece)
        elif "content-length" in headers:
            pieces.append(await reader.readexactly(int(headers["content-length"])))
    except (asyncio.IncompleteReadError, ConnectionError):
        return Message(first_line, headers, b"".join(pieces), pieces, whole=False)
    return Message(first_line, headers, b"".join(pieces), pieces)


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk; empty for the last."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


def request(path: str, body: bytes | None = None, method: str | None = None, **headers: str) -> bytes:
    """A request as bytes; keyword names of headers use `_` for `-`."""
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


async def ask(port: int, raw: bytes) -> Message:
    """Sends bytes on a new connection and reads one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        return await read_message(reader)
    finally:
        writer.transport.abort()
