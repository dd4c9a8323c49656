"""A port on loopback that answers `GET /metrics` and nothing else. An agent works as well without it: a port that is
taken is logged, and tried again."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from engine_agent.protocol.local_servers import closing_connections
from engine_agent.protocol.metrics import CONTENT_TYPE

HOST = "127.0.0.1"
READ_LIMIT_S = 5.0
MAX_HEAD_BYTES = 8 * 1024
TRY_AGAIN_S = 30.0

log = logging.getLogger(__name__)


async def serve_metrics(port: int, exposition: Callable[[], str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(READ_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, exposition))
                await writer.drain()

    while True:
        try:
            async with await asyncio.start_server(
                closing_connections(answer), HOST, port, limit=MAX_HEAD_BYTES
            ) as server:
                await server.serve_forever()
        except OSError as error:
            log.warning("no metrics on %s:%d: %s", HOST, port, error.strerror or error)
            await asyncio.sleep(TRY_AGAIN_S)


def _response(head: bytes, exposition: Callable[[], str]) -> bytes:
    if head.split(b"\r\n", 1)[0].split(b" ")[:2] != [b"GET", b"/metrics"]:
        return _message(b"404 Not Found", b"text/plain", b"GET /metrics is all there is\n")
    return _message(b"200 OK", CONTENT_TYPE, exposition().encode())


def _message(status: bytes, content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status,
        content_type,
        len(body),
        body,
    )
