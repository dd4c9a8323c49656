"""KServe's protocol as Triton speaks it over HTTP on loopback: readiness, and generation as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11

from engine_agent.engines.triton.repository import MODEL

LOOPBACK = "127.0.0.1"
READY_PATH = f"/v2/models/{MODEL}/ready"
GENERATE_PATH = f"/v2/models/{MODEL}/generate_stream"
METRICS_PATH = "/metrics"
_PIECE_BYTES = 65_536
_LONGEST_EVENT_BYTES = 16 * 1024 * 1024


class KServeError(Exception):
    """Triton or its model refused a request. `status` is that of the model's error, else 500."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class TritonGone(Exception):
    """The connection to Triton failed or ended too early."""


class KServe:
    def __init__(self, server_port: int, metrics_port: int) -> None:
        self._server_port, self._metrics_port = server_port, metrics_port

    async def is_ready(self) -> bool:
        """Whether the model is loaded, and its process of the backend runs."""
        with suppress(TritonGone):
            async with _exchange(self._server_port, "GET", READY_PATH) as (status, _):
                return status == 200
        return False

    async def metrics(self) -> bytes:
        """Triton's page of metrics. Raises TritonGone."""
        async with _exchange(self._metrics_port, "GET", METRICS_PATH) as (_, pieces):
            return b"".join([piece async for piece in pieces])

    async def generate(self, inputs: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yields the outputs of each answer of the model. Raises KServeError, or TritonGone if the end is missing."""
        body = json.dumps(inputs).encode()
        async with _exchange(self._server_port, "POST", GENERATE_PATH, body) as (status, pieces):
            if status != 200:
                raise _error(b"".join([piece async for piece in pieces]))
            async for event in _events(pieces):
                if "error" in event:
                    raise _error(event["error"])
                yield event

    async def cancel(self, request: str) -> None:
        """Ends a request, which still sends its last answer with the counts. Does nothing if it is over."""
        with suppress(KServeError, TritonGone):
            async for _ in self.generate({"cancel": request}):
                pass


@asynccontextmanager
async def _exchange(
    port: int, method: str, path: str, body: bytes = b""
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """One request on its own connection. Yields the status and the pieces of the body. Raises TritonGone."""
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError as error:
        raise TritonGone(f"Triton does not listen: {error}") from error
    try:
        protocol = h11.Connection(h11.CLIENT)
        headers = [
            *(("host", LOOPBACK), ("connection", "close")),
            *(("content-type", "application/json"), ("content-length", str(len(body)))),
        ]
        writer.write(protocol.send(h11.Request(method=method, target=path, headers=headers)) or b"")
        writer.write((protocol.send(h11.Data(body)) or b"") + (protocol.send(h11.EndOfMessage()) or b""))
        head = await _next_event(protocol, reader)
        if not isinstance(head, h11.Response):
            raise TritonGone("Triton closed the connection")
        yield head.status_code, _body(protocol, reader)
    except (OSError, h11.RemoteProtocolError) as error:
        raise TritonGone(f"the connection to Triton broke: {error}") from error
    finally:
        writer.close()


async def _next_event(protocol: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := protocol.next_event()) is h11.NEED_DATA:
        protocol.receive_data(await reader.read(_PIECE_BYTES))
    return event


async def _body(protocol: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while not isinstance(event := await _next_event(protocol, reader), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise TritonGone("Triton closed the connection")
        yield bytes(event.data)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yields server-sent events that are JSON objects."""
    held = b""
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield json.loads(line.removeprefix(b"data:"))
        if len(held) > _LONGEST_EVENT_BYTES:
            raise TritonGone(f"an event of Triton exceeds {_LONGEST_EVENT_BYTES} bytes")


def _error(stated: bytes | str) -> KServeError:
    """An error of the model is JSON with `code` and `message`; Triton's own are text, or JSON with `error`. An error
    before the first answer has status 500, and is an event as well."""
    text = stated.decode("utf-8", "replace") if isinstance(stated, bytes) else stated
    text = text.removeprefix("data:").strip()
    try:
        error = json.loads(text)
    except ValueError:
        return KServeError(text)
    if isinstance(error, dict) and isinstance(error.get("error"), str):
        return _error(error["error"])
    if isinstance(error, dict) and "message" in error:
        status = error.get("code")
        return KServeError(str(error["message"]), status if isinstance(status, int) and 400 <= status < 600 else 500)
    return KServeError(text)
