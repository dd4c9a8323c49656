"""Brings the laboratory's addresses to the real host: `python -m bench.lab.forward LISTENER=ADDRESS:PORT …`, where each
LISTENER is the descriptor of a socket that listens on the real host's loopback. It needs no right there: the sockets
stay where they were made while this process enters the laboratory's network.
"""

import asyncio
import contextlib
import socket
import struct
import sys

from bench.lab import kernel
from bench.lab.topology import OUTSIDE

CONNECTS_WITHIN_S = 5.0
PIECE_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)
"""struct linger: closing sends a reset, as a connection that could not be made deserves."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int) -> None:
    """One connection of a client, both ways, each until its sender has said all."""
    try:
        async with asyncio.timeout(CONNECTS_WITHIN_S):
            to_host, from_client = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        _reset(writer)
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, from_client))
            both.create_task(_pump(to_host, writer))
    except* OSError:
        _reset(writer)
        _reset(from_client)
    finally:
        for end in (writer, from_client):
            end.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        target.write(piece)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.close()


async def _serve(listeners: list[tuple[socket.socket, str, int]]) -> None:
    for listener, address, port in listeners:
        for_connection = _to(address, port)
        await asyncio.start_server(for_connection, sock=listener, backlog=256)
    print("ready", flush=True)
    await asyncio.Event().wait()


def _to(address: str, port: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    return lambda reader, writer: carry(reader, writer, address, port)


def main(argv: list[str]) -> None:
    """Run until killed."""
    kernel.die_with_parent()
    listeners = []
    for text in argv:
        descriptor, _, target = text.partition("=")
        address, _, port = target.rpartition(":")
        listeners.append((socket.socket(fileno=int(descriptor)), address, int(port)))
    kernel.join(kernel.NETWORKS / OUTSIDE)
    asyncio.run(_serve(listeners))


if __name__ == "__main__":
    main(sys.argv[1:])
