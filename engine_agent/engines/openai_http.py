"""HTTP of the engines that this project writes, the simulator and the front of Triton: ASGI helpers, one uvicorn server
on one or two ports, and the parts of OpenAI's answers that do not depend on the engine. The server leaves signals to
the process and logs no requests."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn

from engine_agent.protocol.api_surface import ErrorForm, error_object
from engine_agent.protocol.ingress_messages import MAX_BODY_BYTES
from engine_agent.protocol.local_servers import StateWatch
from engine_agent.protocol.ticks import seconds_to_tick

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Routes = Mapping[tuple[str, str], App]


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class BodyTooLarge(ValueError):
    pass


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive) -> bytes:
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
    headers = [(b"content-type", content_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def respond(send: Send, status: int, body: bytes, content_type: str = "application/json") -> None:
    await start_response(send, status, content_type, len(body))
    await send_body(send, body)


def find_route(routes: Routes, scope: Scope) -> App | int:
    """Returns the application for a request, or the status if there is none (404, 405)."""
    method, path = scope["method"], scope["path"]
    if (method, path) in routes:
        return routes[method, path]
    return 405 if any(path == known for _, known in routes) else 404


class HealthPage:
    """`GET /health`: 200, or 503 with the reason; a long poll waits for a change. `health` returns the reason, empty if
    healthy."""

    def __init__(self, health: Callable[[], str], watch: StateWatch) -> None:
        self._health = health
        self._watch = watch

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        held_s = await self._watch.wait_for_change(scope["query_string"].decode("latin-1"))
        reason = self._health()
        body = {"reason": reason, "state": self._watch.name(), "held_ms": held_s * 1000}
        await respond(send, 503 if reason else 200, msgspec.json.encode(body))


_KEEP_ALIVE_S = 75
"""Longer than a proxy keeps an idle connection, so that it never sends a request on one that is being closed."""
_BACKLOG = 2048


class PortTaken(Exception):
    """A port cannot be bound; the text states which and why."""


class HttpListeners:
    """Accepts connections from construction on, and answers between `serve` and `stop`."""

    def __init__(self, apps: Mapping[Endpoint, App]) -> None:
        """`apps`: applications by address. Raises PortTaken if an address cannot be bound."""
        self._apps = {endpoint.port: app for endpoint, app in apps.items()}
        self._sockets = [bind_port(endpoint) for endpoint in apps]
        self._server = _Server(
            uvicorn.Config(
                self._dispatch,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                log_level="critical",
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def serve(self) -> None:
        """Answers requests until `stop`, and then those in flight."""
        await self._server.serve(self._sockets)

    def stop(self, grace_s: float) -> None:
        """Accepts no more connections; responses that are unfinished after `grace_s` seconds are cut off."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        self._server.stopping.set()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[scope["server"][1]](scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """uvicorn's loop checks ten times a second whether to stop; this one wakes once a second to renew the header
        `Date`."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(asyncio.get_running_loop().time())):
                    await self.stopping.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the process."""
        yield


def bind_port(endpoint: Endpoint) -> socket.socket:
    """Returns a socket that is bound but does not listen yet. Raises PortTaken if the address is in use, or not one of
    this machine."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((endpoint.host, endpoint.port))
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {endpoint}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def event(body: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode(error_object(ErrorForm.OPENAI, status, message, code=code, param=param))


def error_event(status: int, message: str) -> bytes:
    """Returns the last event of an OpenAI stream that failed; no `[DONE]` follows it."""
    return b"data: " + error_body(status, message) + b"\n\n"


def models_body(cards: Iterable[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": list(cards)})
