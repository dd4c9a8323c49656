"""Selects the paths that a listener of web serves. Agents use a separate listener with TLS."""

from collections.abc import Awaitable, Callable
from typing import Any

AGENT_ONLY_PATHS = ("/agents/", "/join")
INGRESS_PATHS = ("/v1/async/", "/v1/responses", "/v1/usage", "/v1/files", "/v1/batches")
"""Of applications: ingresses forward them over the connection that agents use."""

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
REFUSED = b"agents connect to the port for agents (SWITCHYARD_AGENT_PORT), over TLS\n"
UNKNOWN = b"this port is for agents\n"


class PathsOf:
    """An ASGI application that serves these paths of another one alone, or all but these."""

    def __init__(self, inner: Any, prefixes: tuple[str, ...], *, are_served: bool) -> None:
        self._inner = inner
        self._prefixes = prefixes
        self._are_served = are_served

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        # Decoded already. The router of WebSockets takes off all slashes before it looks.
        path = "/" + scope.get("path", "").lstrip("/")
        if path.startswith(self._prefixes) == self._are_served or scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, send)
            return
        body = UNKNOWN if self._are_served else REFUSED
        kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": f"{kind}.start", "status": 404, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})
