"""Accepts agents' connections, so many of one address: each counts from when it is accepted, its handshake included, to
its end. Who is at the other end is for the listener to find out.

Agents behind one address translation share a limit, so that is far above what they need. Processes of this host have
none: they could take its ports and files anyway.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from kernel.addresses import client_network

MOST_PER_NETWORK = 1_000
"""Three times what 300 agents behind one address have when each has just lost a connection and opens another."""
MOST_HANDSHAKES = 2_000
"""Of everybody, at once. A quarter of the files that a process may have open, at the least that we run with."""
PAUSE_S = 1.0
"""After the kernel gave no connection, such as for want of files."""

log = logging.getLogger(__name__)

MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of a connection, which calls what it is given once that has ended."""


class AgentDoor:
    """A server over TLS on a socket that is bound, which ends as asyncio's own do. `handshake_s`: how long a handshake
    may take."""

    def __init__(self, bound: socket.socket, context: ssl.SSLContext, make: MakeProtocol, handshake_s: float) -> None:
        self._bound, self._context, self._make, self._handshake_s = bound, context, make, handshake_s
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.open = Counter[str]()

    def start(self, backlog: int) -> None:
        """Listen from now on, until `close`."""
        self._bound.setblocking(False)  # else waiting for a connection holds the whole event loop
        self._bound.listen(backlog)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept none any more; those that are open go on."""
        if self._accepting is not None:
            self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        self._bound.close()

    async def wait_closed(self) -> None:
        if self._accepting is not None:
            await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._bound)
            except OSError as error:
                log.error("no connection of an agent can be accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            network = client_network(str(address[0]))
            if not self._has_room(network):
                connection.close()
                continue
            self.open[network] += 1
            handshake = loop.create_task(self._admit(connection, network))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    def _has_room(self, network: str) -> bool:
        if len(self._handshakes) >= MOST_HANDSHAKES:
            return False
        return self.open[network] < MOST_PER_NETWORK or _is_own(network)

    async def _admit(self, connection: socket.socket, network: str) -> None:
        has_ended = False

        def ended() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._end(network)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(ended),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            connection.close()
            ended()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _end(self, network: str) -> None:
        self.open[network] -= 1
        if self.open[network] <= 0:
            del self.open[network]


def _is_own(network: str) -> bool:
    try:
        return ipaddress.ip_network(network).is_loopback
    except ValueError:
        return False
