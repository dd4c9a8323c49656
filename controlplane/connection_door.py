"""Accepts the connections of one of web's listeners, a limited number from each network. A connection counts from when
it is accepted, its handshake included, to its end.

Clients behind one address translation share a limit, so it is far above what they need. Some addresses have none:
processes of this host could take its ports and files anyway, and a trusted proxy connects for all its clients."""

import asyncio
import logging
import resource
import socket
import ssl
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from controlplane.refused_requests import RequestRefused, refuse
from kernel.addresses import client_network, is_loopback

WAITS_FOR_S = 4.0
"""Longest wait for a place among the handshakes. It leaves an agent 6 of its 10 s for the handshake. Closing it earlier
would cost both sides more than a wait."""
HANDSHAKES_LEAST = 100
HANDSHAKES_WITHIN_S, PACE_OVER_S = 2.5, 5.0
"""So many handshakes run at the same time as end within `HANDSHAKES_WITHIN_S`, at the pace of the last `PACE_OVER_S`.
More of them would all end late, on a slow host too late, and begin again."""
ACCEPTED_TOGETHER = 32
"""Connections that are accepted in one step of the event loop."""
PAUSE_S = 1.0
"""After `accept` failed, for example because the process has no free file."""

log = logging.getLogger(__name__)

MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of a connection, which calls what it is given once that has ended."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one listener. `http`: connections that are no WebSocket; `handshakes`: of TLS, at the same time, fewer on a
    slow host; `waiting`: connections that wait for a place among these.

    1,000 of a network are three times what 300 agents behind one address have when each has just lost a connection and
    opens another."""

    http: int = 2_000
    per_network: int = 1_000
    handshakes: int = 2_000
    waiting: int = 4_000

    @classmethod
    def of_files(cls, files: int) -> "ConnectionLimits":
        """So that both listeners together leave half of the files that a process may have open: for agents'
        WebSockets, for those of people, and for the database."""
        http = min(cls().http, files // 4)
        waiting = min(cls().waiting, files // 8)
        return cls(http=http, per_network=min(cls().per_network, http // 2), handshakes=http, waiting=waiting)


def raised_file_limit() -> int:
    """How many files this process may have open, from now on as many as it may allow itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


class ConnectionDoor:
    """A server on a socket that is bound, which ends as asyncio's own do. `context`: None for plain connections;
    `handshake_s`: how long a handshake may take."""

    def __init__(
        self,
        bound: socket.socket,
        make: MakeProtocol,
        limits: ConnectionLimits,
        *,
        is_unlimited: Callable[[str], bool],
        context: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self._bound, self._make, self._limits, self._is_unlimited = bound, make, limits, is_unlimited
        self._context, self._handshake_s = context, handshake_s
        self._handshakes: defaultdict[str, dict[asyncio.Task[None], None]] = defaultdict(dict)
        """Of each network, the oldest first."""
        self._handshakes_count = 0
        self._waiting: dict[socket.socket, tuple[str, asyncio.TimerHandle]] = {}
        """Connections that wait for a handshake, with their network and the end of their wait, oldest first."""
        self._ended_s: deque[float] = deque()
        """When the handshakes of the last `PACE_OVER_S` ended."""
        self._resuming: asyncio.TimerHandle | None = None
        self.open = Counter[str]()
        self.pending_hellos: Callable[[], int] = lambda: 0
        """How many connections have had their handshake and are not served yet. They count as handshakes do: else the
        work of a handshake would be spent on clients that are then told to come again."""

    def start(self, backlog: int) -> None:
        """Listen from now on, until `close`."""
        self._bound.setblocking(False)  # else waiting for a connection holds the whole event loop
        self._bound.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept none any more; those that are open continue."""
        self._pause()
        for connection in list(self._waiting):
            self._stop_waiting(connection)
        for handshake in self._all_handshakes():
            handshake.cancel()
        self._bound.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._all_handshakes(), return_exceptions=True)

    @property
    def is_full(self) -> bool:
        """Whether further connections are closed because too many are on their way in."""
        return self._handshakes_count + self.pending_hellos() >= self._handshakes_most()

    def _handshakes_most(self) -> int:
        while self._ended_s and self._ended_s[0] < monotonic() - PACE_OVER_S:
            self._ended_s.popleft()
        paced = int(len(self._ended_s) * HANDSHAKES_WITHIN_S / PACE_OVER_S)
        return min(max(paced, HANDSHAKES_LEAST), self._limits.handshakes)

    def _all_handshakes(self) -> list[asyncio.Task[None]]:
        return [handshake for each in self._handshakes.values() for handshake in each]

    def _resume(self) -> None:
        self._resuming = None
        asyncio.get_running_loop().add_reader(self._bound, self._accept)

    def _pause(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        elif self._bound.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._bound)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_TOGETHER):
            try:
                connection, address = self._bound.accept()
            except (BlockingIOError, ConnectionAbortedError):  # the client may have left already
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                self._pause()
                self._resuming = asyncio.get_running_loop().call_later(PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            self._let_in(connection, str(address[0]))

    def _let_in(self, connection: socket.socket, address: str) -> None:
        """Begins the handshake, has the connection wait, or closes it."""
        network = client_network(address)
        if self.open[network] >= self._limits.per_network and not self._is_unlimited(address):
            connection.close()
        elif not self.is_full or self._made_room(network):
            self.open[network] += 1
            self._begin_handshake(connection, network)
        elif len(self._waiting) < self._limits.waiting:
            self.open[network] += 1
            ends = asyncio.get_running_loop().call_later(WAITS_FOR_S, self._stop_waiting, connection)
            self._waiting[connection] = (network, ends)
        else:
            connection.close()

    def admit_waiting(self) -> None:
        """Call it when a place among the handshakes may be free."""
        while self._waiting and not self.is_full:
            connection = next(iter(self._waiting))
            network, ends = self._waiting.pop(connection)
            ends.cancel()
            self._begin_handshake(connection, network)

    def _stop_waiting(self, connection: socket.socket) -> None:
        network, ends = self._waiting.pop(connection)
        ends.cancel()
        connection.close()
        self._close_connection(network)

    def _begin_handshake(self, connection: socket.socket, network: str) -> None:
        handshake = asyncio.get_running_loop().create_task(self._admit(connection, network))
        self._handshakes[network][handshake] = None
        self._handshakes_count += 1
        handshake.add_done_callback(partial(self._end_handshake, network))

    def _end_handshake(self, network: str, handshake: asyncio.Task[None]) -> None:
        self._forget(network, handshake)
        self.admit_waiting()

    def _made_room(self, network: str) -> bool:
        """Whether the network with the most handshakes lost its oldest one to `network`, which has fewer. In a storm of
        agents from many networks each has few, so the newest connections are refused and try again."""
        if self._handshakes_count <= len(self._handshakes):
            return False  # each network has one
        busiest, theirs = max(self._handshakes.items(), key=lambda item: len(item[1]), default=("", {}))
        if len(theirs) <= len(self._handshakes.get(network, ())) + 1:
            return False
        oldest = next(iter(theirs))
        self._forget(busiest, oldest)
        oldest.cancel()
        return True

    def _forget(self, network: str, handshake: asyncio.Task[None]) -> None:
        if network in self._handshakes and handshake in self._handshakes[network]:
            del self._handshakes[network][handshake]
            self._handshakes_count -= 1
            if not self._handshakes[network]:
                del self._handshakes[network]

    async def _admit(self, connection: socket.socket, network: str) -> None:
        has_ended = False

        def ended() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._close_connection(network)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(ended),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
            )
            self._ended_s.append(monotonic())
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            connection.close()
            ended()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _close_connection(self, network: str) -> None:
        self.open[network] -= 1
        if self.open[network] <= 0:
            del self.open[network]


# Limits the requests and WebSockets of one client behind a trusted proxy, by the address that the proxy forwards:
# the proxy's own connections have no limit by network (`controlplane.connection_door`).

MOST_OF_NETWORK = 500
"""Half of what a network has without a proxy: a proxy keeps no idle connections for its clients."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientShare:
    def __init__(self, inner: Asgi) -> None:
        self._inner = inner
        self.under_way = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = (scope.get("client") or ("",))[0]
        network = client_network(address)
        if self.under_way[network] >= MOST_OF_NETWORK and not is_loopback(address):
            await self._refuse(scope, receive, send)
            return
        self.under_way[network] += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self.under_way[network] -= 1
            if not self.under_way[network]:
                del self.under_way[network]

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close"})
            return
        message = f"{MOST_OF_NETWORK} requests from your address are under way; try again when one has ended"
        await refuse(scope, RequestRefused(429, "rate_limit_exceeded", message), send)
