"""Sends one streamed completion over HTTP/1.1 and notes when each piece came. Connections are kept for later requests.

A client of its own because it must cost little: it shares a host with what it measures, and a stream of tokens is a
piece every few milliseconds. It reads what Switchyard's own proxies and OpenAI-compatible engines answer.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from models_registry.planning.point_figures import Sample

HEAD_BYTES = 65_536
CONNECT_S = 5.0
ERROR_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where requests go. `server_name`: what the certificate there must be of; `model`: as requests name it."""

    host: str
    port: int
    model: str
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Piece(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class BadAnswer(Exception):
    """What came back is no answer that can be read; the text says why."""


class LoadClient:
    def __init__(self, target: LoadTarget, now_s: Callable[[], float]) -> None:
        self._target, self._now_s = target, now_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._decode = msgspec.json.Decoder(_Piece).decode
        names = {"Host": f"{target.host}:{target.port}", "Content-Type": "application/json", **target.headers}
        self._head = f"POST {target.path} HTTP/1.1\r\n" + "".join(f"{name}: {text}\r\n" for name, text in names.items())

    async def complete(self, body: bytes, due_s: float) -> Sample:
        """Send it now. Never raises for what the other side does; cancelling it closes its connection."""
        sent_s, connection = self._now_s(), None
        seen = _Seen()
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            keeps = await self._exchange(*connection, body, seen)
            if keeps:
                self._idle.append(connection)
                connection = None
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, ValueError, BadAnswer) as wrong:
            seen.error = seen.error or f"{type(wrong).__name__}: {wrong}"[:200]
        finally:
            if connection is not None:
                connection[1].transport.abort()
        return Sample(
            due_s,
            sent_s,
            seen.first_s,
            self._now_s(),
            seen.status,
            seen.usage.prompt_tokens,
            seen.usage.completion_tokens or seen.pieces,
            (seen.usage.prompt_tokens_details or _Cached()).cached_tokens or 0,
            tuple(seen.gaps_s),
            seen.error,
            seen.cell,
        )

    def close(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(
                target.host, target.port, ssl=target.tls, server_hostname=target.server_name if target.tls else None
            )

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, seen: "_Seen"
    ) -> bool:
        """Whether the connection can be used again."""
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        seen.status = int(head[0].split(" ")[1])
        headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
        seen.cell = headers.get("x-switchyard-cell", "")
        async with aclosing(_parts(reader, headers)) as parts:
            if seen.status != 200:
                seen.error = "".join([part.decode("utf-8", "replace") async for part in parts])[:ERROR_BYTES]
                return False
            rest = b""
            async for part in parts:
                rest = self._read(rest + part, seen)
        if not seen.is_done:
            raise BadAnswer("the answer ended before its last event")
        return headers.get("connection", "").lower() != "close"

    def _read(self, text: bytes, seen: "_Seen") -> bytes:
        """Take the whole events off the text; what is left is the beginning of another."""
        *events, rest = text.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == event or not data:
                continue
            if data == b"[DONE]":
                seen.is_done = True
                continue
            piece = self._decode(data)
            if piece.error is not None:
                raise BadAnswer(bytes(piece.error).decode("utf-8", "replace")[:200])
            seen.usage = piece.usage or seen.usage
            if piece.choices:
                seen.came(self._now_s())
        return rest


@dataclass(slots=True)
class _Seen:
    status: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    pieces: int = 0
    gaps_s: list[float] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    is_done: bool = False
    error: str = ""
    cell: str = ""

    def came(self, now_s: float) -> None:
        if self.pieces:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.pieces, self.last_s = self.pieces + 1, now_s


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """The body in pieces, as they come."""
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif (length := headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        with suppress(EOFError):
            while part := await reader.read(HEAD_BYTES):
                yield part
