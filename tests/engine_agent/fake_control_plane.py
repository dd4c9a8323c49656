"""A small control plane for tests: enrolment and the WebSocket of agents, on a real port, in the test's loop. It sends
only what the test orders, and stores all messages of agents."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn

from engine_agent.protocol.codec import decode_up, encode, frames_of
from engine_agent.protocol.ingress_messages import IngressReport, RoutingTable
from engine_agent.protocol.messages import (
    CertificateRequest,
    Desired,
    DownMessage,
    Hello,
    Holder,
    Report,
    UpMessage,
)
from tests.ports import free_port

M = TypeVar("M", bound=UpMessage)
T = TypeVar("T")


class FakeControlPlane:
    """`join_tokens` may enrol; `credentials` may connect; `greeting` is sent on every connection after its hello.
    `retry_after`: the `Retry-After` of every answer, if set.

    `builds` is a folder with an engine build that it hands out; `build_requests` are the requests for its files: name
    and `Range`. The next `busy_answers` of them are refused as too many.

    `holders` is its answer to nodes that want to know who holds an artifact; `sent_bytes` counts what it handed out.

    `caches` are the compile caches that nodes uploaded, by key: digest, unpacked bytes and archive; None: none are
    shared.

    `orders` has the last order of each node, which is sent again on each of its connections; `by_agent` has the
    messages of each agent, except `requests` for certificates, which get no answer.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.join_tokens = {"join-1"}
        self.credentials: set[str] = set()
        self.greeting: list[DownMessage] = []
        self.orders: dict[str, Desired] = {}
        self.received: list[UpMessage] = []
        self.requests: list[CertificateRequest] = []
        self.by_agent: dict[str, list[UpMessage]] = {}
        self.enrolled: list[dict[str, str]] = []
        self.connections = 0
        self.retry_after: bytes | None = None
        self.builds: Path | None = None
        self.weights: Path | None = None
        self.build_requests: list[tuple[str, str]] = []
        self.busy_answers = 0
        self.holders: list[Holder] = []
        self.sent_bytes = 0
        self.caches: dict[str, tuple[str, int, bytes]] | None = None
        self._sends: list[Callable[[dict[str, Any]], Any]] = []
        self._send_to: dict[str, Callable[[dict[str, Any]], Any]] = {}

    async def order(self, desired: Desired) -> None:
        """Orders one node, now if it is connected and on each later connection."""
        self.orders[desired.node] = desired
        send = self._send_to.get(desired.node)
        if send is not None:
            await send({"type": "websocket.send", "text": encode(desired).decode()})

    async def push(self, message: DownMessage) -> None:
        """Sends to every connected agent, and a routing table also to those that connect later."""
        if isinstance(message, RoutingTable):
            self.greeting = [message]
        for frame in frames_of(message):
            await self.push_text(frame.decode())

    async def push_text(self, frame: str) -> None:
        """Sends a raw frame to every connected agent."""
        for send in self._sends:
            await send({"type": "websocket.send", "text": frame})

    async def hang_up(self) -> None:
        """Closes every connection."""
        for send in self._sends:
            await send({"type": "websocket.close", "code": 1001})

    def of(self, kind: type[M]) -> list[M]:
        """All received messages of one kind, oldest first."""
        return [message for message in self.received if isinstance(message, kind)]

    @property
    def reports(self) -> list[Report | IngressReport]:
        return [message for message in self.received if isinstance(message, Report | IngressReport)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeControlPlane"]:
        """Serves until the block ends. May be entered again, as after an outage."""
        config = uvicorn.Config(
            self._app, interface="asgi3", log_level="warning", lifespan="off", ws="websockets-sansio"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self.port))
        with contextlib.ExitStack() as stack:
            stack.enter_context(listener)
            serving = asyncio.create_task(server._serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._enrol(scope, receive, send)
        elif self.retry_after is not None:
            headers = [(b"retry-after", self.retry_after)]
            await send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": b""})
        elif _bearer(scope) not in self.credentials:
            await send({"type": "websocket.close", "code": 4401})
        else:
            await self._converse(receive, send)

    async def _enrol(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"].startswith("/agents/caches/"):
            await self._share_cache(scope, receive, send)
            return
        if scope["method"] == "GET":
            await self._hand_out(scope, send)
            return
        asked = json.loads((await receive())["body"])
        if scope["path"] != "/agents/enrol" or _bearer(scope) not in self.join_tokens:
            await _answer(send, 401, {"error": "unknown join token"})
            return
        self.enrolled.append(asked)
        credential = f"sw_{len(self.enrolled)}_secret"
        self.credentials.add(credential)
        await _answer(send, 200, {"credential": credential})

    async def _hand_out(self, scope: dict[str, Any], send: Any) -> None:
        if scope["path"].startswith("/agents/holders/"):
            await _answer(send, 200, msgspec.to_builtins(self.holders))
            return
        first, name = dict(scope["headers"]).get(b"range", b"").decode(), scope["path"].rpartition("/")[2]
        self.build_requests.append((name, first))
        if self.busy_answers:
            self.busy_answers -= 1
            await _answer(send, 503, {"error": "too many downloads"})
            return
        if _bearer(scope) not in self.credentials or (whole := self._content(scope["path"])) is None:
            await _answer(send, 404, {"error": "no such build"})
            return
        content = whole[int(first[6:-1] or 0) if first else 0 :]
        self.sent_bytes += len(content)
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 206 if first else 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _share_cache(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        _, _, _, key, *archive = scope["path"].split("/")
        headers = dict(scope["headers"])
        if self.caches is None:
            await _answer(send, 403, {"error": "none are shared here"})
        elif scope["method"] == "GET" and key not in self.caches:
            await _answer(send, 404, {"error": "there is no compile cache for it"})
        elif scope["method"] == "GET" and not archive:
            digest, unpacked, content = self.caches[key]
            await _answer(send, 200, {"digest": digest, "packed_bytes": len(content), "unpacked_bytes": unpacked})
        elif scope["method"] == "GET":
            content = self.caches[key][2]
            self.sent_bytes += len(content)
            length = [(b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            await send({"type": "http.response.body", "body": content})
        else:
            body, more = b"", True
            while more:
                event = await receive()
                body, more = body + event.get("body", b""), event.get("more_body", False)
            if body:
                stored = self.caches.get(key, ("", 0, b""))[2] + body
                about = headers[b"x-content-sha256"].decode(), int(headers[b"x-unpacked-bytes"])
                self.caches[key] = (*about, stored)
            await _answer(send, 200, {"next": len(self.caches.get(key, ("", 0, b""))[2])})

    def _content(self, path: str) -> bytes | None:
        """The file of the build or of the weights, or the sizes of the weights."""
        _, kind, _, *name = path.removeprefix("/").split("/", 3)
        folder = self.builds if kind == "builds" else self.weights
        if folder is not None and not name:
            files = (file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json")
            return json.dumps({file.relative_to(folder).as_posix(): file.stat().st_size for file in files}).encode()
        file = folder / name[0] if folder is not None else None
        return file.read_bytes() if file is not None and file.is_file() else None

    async def _converse(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self.connections += 1
        self._sends.append(send)
        agent = ""
        try:
            while (event := await receive())["type"] == "websocket.receive":
                message = decode_up(event.get("bytes") or event["text"])
                if isinstance(message, CertificateRequest):
                    self.requests.append(message)
                    continue
                self.received.append(message)
                if isinstance(message, Hello):
                    agent = message.id
                    self._send_to[agent] = send
                    greeting = [*self.greeting, *(order for order in [self.orders.get(agent)] if order is not None)]
                    for frame in (frame for down in greeting for frame in frames_of(down)):
                        await send({"type": "websocket.send", "text": frame.decode()})
                self.by_agent.setdefault(agent, []).append(message)
        finally:
            self._sends.remove(send)
            if self._send_to.get(agent) is send:
                del self._send_to[agent]


async def eventually(look: Callable[[], T], within_s: float = 60.0, what: str = "") -> T:
    """Polls until `look` returns a true value, and returns it.

    Raises:
        AssertionError: it stayed false for `within_s`.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    while not (seen := look()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s: {what or look}"
        await asyncio.sleep(0.01)
    return seen


def _bearer(scope: dict[str, Any]) -> str:
    header: bytes = dict(scope["headers"]).get(b"authorization", b"")
    return header.decode().removeprefix("Bearer ")


async def _answer(send: Any, status: int, body: object) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
