"""Brings the laboratory to the real host: `python -m lab.hosts.forward LISTENER=NETWORK@ADDRESS:PORT …`, where LISTENER
is the descriptor of a socket that listens on the real host's loopback. It needs no right there: a socket stays in the
namespace that it was made in, so this process only makes the other ends where they belong."""

import asyncio
import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from functools import partial

from lab.hosts import kernel

CONNECTS_WITHIN_S = 5.0
PIECE_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)
"""struct linger: closing sends a reset, as a connection that could not be made deserves."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect, from which of the laboratory's networks."""

    network: str
    address: str
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises:
        OSError: the connection fails, or the host has no network now."""
        with kernel.inside_network(self.network):
            end = socket.socket()
        end.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(end, (self.address, self.port))
        except BaseException:
            end.close()
            raise
        return await asyncio.open_connection(sock=end)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> None:
    """One connection of a client, both ways, each until the end of its input."""
    try:
        async with asyncio.timeout(CONNECTS_WITHIN_S):
            to_host, from_client = await target.connect()
    except (OSError, TimeoutError):
        refuse(writer)
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, from_client))
            both.create_task(_pump(to_host, writer))
    except* OSError:
        refuse(writer)
        refuse(from_client)
    finally:
        for end in (writer, from_client):
            end.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        target.write(piece)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()


def refuse(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.close()


async def _serve(listeners: list[tuple[socket.socket, Target]]) -> None:
    for listener, target in listeners:
        await asyncio.start_server(partial(_carry_to, target), sock=listener, backlog=256)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _carry_to(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await carry(reader, writer, target)


def main(argv: list[str]) -> None:
    kernel.die_with_parent()
    listeners = []
    for text in argv:
        descriptor, _, way = text.partition("=")
        network, _, place = way.partition("@")
        address, _, port = place.rpartition(":")
        listeners.append((socket.socket(fileno=int(descriptor)), Target(network, address, int(port))))
    asyncio.run(_serve(listeners))


if __name__ == "__main__":
    main(sys.argv[1:])
