"""A small real engine for tests: an HTTP server that handles each request with the test's script."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from engine_agent.protocol.local_servers import closing_connections
from tests.engine_agent.cell_proxy.http_stream import Message, read_body, read_head
from tests.listening import stop_listening

EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % n for n in range(5)]
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def json_answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


ONE_TOKEN = json_answer(b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}')


class Turn:
    def __init__(self, message: Message, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        self.message = message
        self.gone = gone
        """Set when the proxy has closed the connection."""
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_stream(self, events: list[bytes]) -> None:
        await self.send(STREAM_HEAD)
        for event in events:
            await self.send(chunk(event))
        await self.send(b"0\r\n\r\n")

    def end(self) -> None:
        self._writer.close()

    def die(self) -> None:
        """Resets the connection, as the kernel does for a killed process."""
        self._writer.transport.abort()


Script = Callable[[Turn], Awaitable[None]]


async def answer_one_token(turn: Turn) -> None:
    await turn.send(ONE_TOKEN)


class Engine:
    """The server. `script` answers clients' requests; probes are answered from `health` and `token`."""

    def __init__(self) -> None:
        self.script: Script = answer_one_token
        self.health = json_answer(b"{}")
        self.token = ONE_TOKEN
        self.token_probes = 0
        self.ledger: dict[str, bytes] = {}
        """Answers of paths below /switchyard/ and of /metrics; others get 404."""
        self.counts: Callable[[Message], bytes] = lambda _: json_answer(b"{}", b"404 Not Found")
        """The answer to a count of tokens."""
        self.asked_for_usage: list[str] = []
        """Exchanges that the proxy queried."""
        self.read_bodies = asyncio.Event()
        """Cleared: heads are read, bodies stay in the socket."""
        self.read_bodies.set()
        self.requests: list[Message] = []
        self.exports: list[Message] = []
        """Requests to /v1/traces: the engine can replace a collector."""
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(closing_connections(self._connected), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Closes the port and every connection."""
        if self._server is not None:
            await stop_listening(self._server)
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted = False
        while True:
            head = await read_head(reader)
            await self.read_bodies.wait()
            message = await read_body(reader, *head)
            if not message.whole:
                return
            if message.headers.get("x-request-id") == "probe":
                await self._answer_probe(message, writer)
                continue
            self.connections += not counted
            counted = True
            self.requests.append(message)
            await self._run_script(message, reader, writer)

    async def _answer_probe(self, message: Message, writer: asyncio.StreamWriter) -> None:
        path, _, query = message.first_line.split(" ")[1].partition("?")
        if path.startswith(("/switchyard/", "/metrics")):
            self.asked_for_usage += [query.removeprefix("exchange=")] if query.startswith("exchange=") else []
            writer.write(self.ledger.get(path, json_answer(b"{}", b"404 Not Found")))
            await writer.drain()
            return
        if path in {"/tokenize", "/v1/messages/count_tokens"}:
            writer.write(self.counts(message))
            await writer.drain()
            return
        if " /v1/traces " in message.first_line:
            self.exports.append(message)
        is_health = " /health " in message.first_line
        self.token_probes += not is_health
        writer.write(self.health if is_health else self.token)
        await writer.drain()

    async def _run_script(self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.Event()
        script = asyncio.ensure_future(self.script(Turn(message, writer, gone)))
        watch = asyncio.ensure_future(_wait_for_close(reader))
        watch.add_done_callback(lambda done: None if done.cancelled() else gone.set())
        try:
            await script
        finally:
            script.cancel()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def _wait_for_close(reader: asyncio.StreamReader) -> None:
    """Returns when the peer closes; the proxy sends nothing while it waits for an answer."""
    with suppress(ConnectionError):
        await reader.read(1)


@asynccontextmanager
async def running_engine(script: Script = answer_one_token) -> AsyncIterator[Engine]:
    engine = Engine()
    engine.script = script
    await engine.start()
    try:
        yield engine
    finally:
        await engine.die()
