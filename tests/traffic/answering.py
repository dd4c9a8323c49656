"""An ingress that answers one question on each connection as a test says, over real TCP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def ingress(says: Says, sent: bytearray | None = None) -> AsyncIterator[tuple[str, int]]:
    """Its address. It reads a request whose body is `{}` (into `sent`) and then does what `says` does."""
    serving: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        with suppress(ConnectionError):
            request = await reader.readuntil(b"{}")
            if sent is not None:
                sent.extend(request)
            await says(reader, writer)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]
        await asyncio.gather(*serving)
