"""A stand-in ingress that answers one request per connection as a test says, over TCP or TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from engine_agent.protocol.ports import HOPS_ABOVE
from traffic.routing.planning.tables import IngressAddress

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def ingress(
    says: Says, sent: bytearray | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[IngressAddress]:
    """Yields its address. It reads a request with the body `{}` into `sent`, and then calls `says`. With `tls` it
    listens on the hop port."""
    serving: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        # A client with a limit of milliseconds may leave before it has sent its request.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"{}")
            if sent is not None:
                sent.extend(request)
            await says(reader, writer)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield IngressAddress("i-x", "us-east-1", "127.0.0.1", port - HOPS_ABOVE if tls else port)
        await asyncio.gather(*serving)
