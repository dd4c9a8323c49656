"""Limits the requests and WebSockets of one client behind a trusted proxy, by the address that the proxy forwards: the
proxy's own connections have no limit by network (`controlplane.connection_door`)."""

from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from controlplane.refused_requests import RequestRefused, refuse
from kernel.addresses import client_network, is_loopback

MOST_OF_NETWORK = 500
"""Half of what a network has without a proxy: a proxy keeps no idle connections for its clients."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientShare:
    """An ASGI application around another one."""

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
