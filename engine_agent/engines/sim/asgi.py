"""The few pieces of ASGI that the engine's two small applications share: read a body, send an answer, route, and say
how the member is."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from engine_agent.protocol.ingress_messages import MAX_BODY_BYTES
from engine_agent.protocol.local_servers import StateWatch

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Routes = Mapping[tuple[str, str], App]


class BodyTooLarge(ValueError):
    """More than `MAX_BODY_BYTES` of body."""


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request.

    Raises:
        BodyTooLarge, ClientLeft
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(pieces)


async def start_response(send: Send, status: int, content_type: str, length: int | None = None) -> None:
    """Send status and headers. Without a length the body is a stream of unknown length."""
    headers = [(b"content-type", content_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, more: bool = False) -> None:
    """Send a piece of the body; `more` says that it is not the last."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def respond(send: Send, status: int, body: bytes, content_type: str = "application/json") -> None:
    await start_response(send, status, content_type, len(body))
    await send_body(send, body)


def find_route(routes: Routes, scope: Scope) -> App | int:
    """The application for a request, or the status that says why there is none (404, 405)."""
    method, path = scope["method"], scope["path"]
    if (method, path) in routes:
        return routes[method, path]
    return 405 if any(path == known for _, known in routes) else 404


class HealthPage:
    """`GET /health`: 200, or 503 with why this member is unhealthy; held while nothing changes if the question says
    so. `health` is empty when it is healthy."""

    def __init__(self, health: Callable[[], str], watch: StateWatch) -> None:
        self._health = health
        self._watch = watch

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        held_s = await self._watch.wait_for_change(scope["query_string"].decode("latin-1"))
        reason = self._health()
        said = {"reason": reason, "state": self._watch.name(), "held_ms": held_s * 1000}
        await respond(send, 503 if reason else 200, msgspec.json.encode(said))
