"""A fake cell in the test's loop: simplified OpenAI API and GET /healthz."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.cell_proxy.prefix_index import PrefixIndex
from engine_agent.node.identity import Identity
from engine_agent.protocol.continuation import prompt_mark, tokens_mark
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint, cell_server_name
from engine_agent.protocol.proxy_messages import PREFIXES_PATH, CellLoad, HealthAnswer
from tests.engine_agent.tls import identity_of
from tests.listening import stop_listening

Writer = asyncio.StreamWriter
_numbers = itertools.count(1)
NODE = "n-0c0c0c0c"
"""The node of every cell without its own certificate."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded


class FakeCell:
    """One cell. An answer has `chunks` tokens, `step_s` apart; streams wait for `release` before the last one."""

    def __init__(
        self,
        name: str = "",
        *,
        chunks: int = 1,
        step_s: float = 0.0,
        max_connections: int = 16,
        identity: Identity | None = None,
    ) -> None:
        self.name = name or f"cell-{next(_numbers)}"
        self.node = NODE
        self._identity = identity or identity_of(IdentityKind.NODE, NODE)
        self.chunks = chunks
        self.step_s = step_s
        self.max_connections = max_connections
        self.generation = 1
        self.version = ""
        self.dies_after: int | None = None
        """It closes a stream after so many tokens."""
        self.broken_stream: bytes = b""
        """It answers a stream with these bytes, and closes the connection."""
        self.healthy = True
        self.drains = False
        self.refuses = False
        self.fails = False
        self.drops = False
        """It closes the connection of a request without a byte, like a process that the request kills."""
        self.usage: dict[str, int] | None = None
        self.last_event: dict[str, Any] | None = None
        """The last event of a stream, which is no text."""
        self.headers = ""
        """Additional header lines of answers."""
        self.load: CellLoad | None = None
        """In answers to health queries; None: it reports none."""
        self.cache = PrefixIndex()
        """Its cached prefixes; unknown until its engine reports blocks."""
        self.release = asyncio.Event()
        self.release.set()
        self.requests: list[Request] = []
        self.in_flight = 0
        self.port = 0
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._conversations: set[asyncio.Task[None]] = set()

    def endpoint(self, *, drain: bool = False) -> CellEndpoint:
        return CellEndpoint(
            cell=self.name,
            generation=self.generation,
            address="127.0.0.1",
            port=self.port,
            max_connections=self.max_connections,
            drain=drain,
            node=self.node,
            version=self.version,
        )

    async def start(self) -> None:
        """Listens, on its previous port if there was one."""
        begin = functools.partial(self._begin, self._serve)
        tls = self._identity.server_context()
        server = await asyncio.start_server(begin, "127.0.0.1", self.port, backlog=1024, ssl=tls)
        self._servers.append(server)
        self.port = server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Closes all sockets, like kill -9."""
        await stop_listening(*self._servers)
        self._servers.clear()
        for writer in list(self._writers):
            writer.transport.abort()

    @contextlib.contextmanager
    def power_off(self) -> Iterator[None]:
        """Stops answering, like a host without power: new connections get no reply, and requests wait. The socket does
        not accept, and its backlog is full, so the kernel drops packets."""
        with contextlib.ExitStack() as stack:
            for server in self._servers:
                for listener in server.sockets:
                    asyncio.get_running_loop().remove_reader(listener.fileno())
                    stack.enter_context(socket.socket(fileno=os.dup(listener.fileno()))).listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", self.port))
            yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeCell"]:
        await self.start()
        try:
            yield self
        finally:
            self.release.set()
            await self.die()
            for conversation in self._conversations:
                conversation.cancel()
            await asyncio.gather(*self._conversations, return_exceptions=True)
            await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def _begin(
        self, converse: Callable[..., Coroutine[None, None, None]], reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        """Registers a connection immediately, so that none outlives the test."""

        def end(task: asyncio.Task[None]) -> None:
            self._conversations.discard(task)
            writer.close()

        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(converse(reader, writer))
        self._conversations.add(task)
        task.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                await self._answer(await _read_request(reader), writer)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/healthz":
            healthy = self.healthy and self._is_for_me(request)
            body = msgspec.json.encode(HealthAnswer(ok=True, load=self.load)) if self.load else b""
            _write_head(writer, 503 if not healthy else 404 if self.drains else 200, len(body))
            writer.write(body)
            return
        if request.path.startswith(PREFIXES_PATH):
            asked = dict(pair.split("=") for pair in request.path.partition("?")[2].split("&"))
            changes = msgspec.msgpack.encode(self.cache.after(asked["life"], int(asked["after"])))
            _write_head(writer, 200, len(changes))
            writer.write(changes)
            return
        self.requests.append(request)
        if self.drops:
            raise EOFError
        if self.refuses or not self._is_for_me(request):
            _write_head(writer, 503, 0, "X-Switchyard-Retry: 1\r\n")
            return
        if self.fails:
            _write_head(writer, 500, 0)
            return
        self.in_flight += 1
        try:
            await self._generate(request, writer)
        finally:
            self.in_flight -= 1

    def _is_for_me(self, request: Request) -> bool:
        """Agents that read the load name no start."""
        own = cell_server_name(self.name, self.generation)
        return request.headers.get("x-switchyard-server", own if request.method == "GET" else "") == own

    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        asked = request.json
        if not asked.get("stream"):
            await asyncio.sleep(self.step_s * self.chunks)
            await self.release.wait()
            body = json.dumps(_completion(asked["model"], self.name) | self._usage()).encode()
            _write_head(writer, 200, len(body), self.headers)
            writer.write(body)
            await writer.drain()
            return
        head = f"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{self.headers}\r\n"
        writer.write(f"HTTP/1.1 200 OK\r\n{head}".encode())
        if self.broken_stream:
            _write_chunk(writer, self.broken_stream)
            await writer.drain()
            raise EOFError
        marked = "x-switchyard-continuation" in request.headers
        if marked:
            _write_chunk(writer, prompt_mark("1:0"))
        for number in range(self.chunks):
            if number == self.chunks - 1:
                await self.release.wait()
            if number == self.dies_after:
                raise EOFError
            event = b"data: " + json.dumps(_delta(asked["model"], f"{number} ")).encode() + b"\n\n"
            _write_chunk(writer, (tokens_mark([number]) if marked else b"") + event)
            await writer.drain()
            await asyncio.sleep(self.step_s)
        if self.usage is not None:
            _write_chunk(writer, b"data: " + json.dumps({"choices": [], **self._usage()}).encode() + b"\n\n")
        if self.last_event is not None:
            _write_chunk(writer, b"data: " + json.dumps(self.last_event).encode() + b"\n\n")
        _write_chunk(writer, b"data: [DONE]\n\n")
        _write_chunk(writer, b"")

    def _usage(self) -> dict[str, Any]:
        return {} if self.usage is None else {"usage": self.usage}


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:] if line)}
    if "chunked" in headers.get("transfer-encoding", ""):
        return Request(method, path, headers, await _read_chunks(reader))
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int(await reader.readline(), 16)
        if size == 0:
            while await reader.readline() != b"\r\n":
                pass  # a trailer
            return body
        body += (await reader.readexactly(size + 2))[:-2]


def _write_head(writer: asyncio.StreamWriter, status: int, length: int, more: str = "") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{more}\r\n"
    writer.write(head.encode())


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _completion(model: str, text: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}


def _delta(model: str, text: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": None, "delta": {"content": text}}
    return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}
