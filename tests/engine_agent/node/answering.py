"""A server that sends the same bytes on every connection, and closes it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engine_agent.protocol.local_servers import closing_connections


@contextlib.asynccontextmanager
async def answering(content: bytes | None) -> AsyncIterator[str]:
    """Yields the URL; None: accepts the request and sends nothing."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if content is None:
            await done.wait()
        else:
            writer.write(content)
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    server = await asyncio.start_server(closing_connections(serve), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/asked"
        done.set()
