"""Servers on unix sockets, reached by TCP: a container sees no socket of this computer, and its account is another."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def by_tcp(*sockets: str) -> Iterator[list[int]]:
    """A port of 127.0.0.1 for each."""
    loop = asyncio.new_event_loop()
    ports: list[int] = []

    async def listen() -> list[asyncio.Server]:
        servers = []
        for path in sockets:
            server = await asyncio.start_server(lambda r, w, path=path: _carry(path, r, w), "127.0.0.1", 0)  # type: ignore[misc]
            ports.append(server.sockets[0].getsockname()[1])
            servers.append(server)
        return servers

    servers = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, name="by-tcp")
    thread.start()
    try:
        yield ports
    finally:
        asyncio.run_coroutine_threadsafe(_end(servers), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _carry(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
    finally:
        writer.close()
