"""A relay in the test's loop, in front of scripted cells instead of an ingress."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from engine_agent.protocol.continuation import prompt_mark, prompt_name, tokens_mark
from engine_agent.protocol.ingress_messages import RefusedAccount
from engine_agent.protocol.stream_counts import PoolStreams
from engine_agent.relay.server import RelayServer
from tests.engine_agent.fake_control_plane import eventually

CHAT = "/v1/chat/completions"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-switchyard-version: %b\r\nx-switchyard-from: %b\r\nx-switchyard-deployment: demo\r\n\r\n"
)
WORDS = [f"w{number}" for number in range(8)]
PROMPT = prompt_name([1, 2, 3])


class Request:
    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode().split("\r\n")
        self.path = lines[0].split()[1]
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        self.body: dict[str, Any] = json.loads(body)

    @property
    def groups(self) -> list[list[int]]:
        groups: list[list[int]] = self.body.get("switchyard_continuation", {}).get("groups", [])
        return groups


Cell = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def event(number: int, created: int = 1) -> bytes:
    """One event of a chat with its mark, in the words that every cell would write."""
    choice = {"index": 0, "delta": {"content": WORDS[number]}}
    body = json.dumps({"id": "chatcmpl-r", "created": created, "choices": [choice]}).encode()
    return tokens_mark([number]) + b"data: " + body + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(name: str, version: str = "1") -> bytes:
    return HEAD % (version.encode(), name.encode())


def cell(name: str, upto: int = len(WORDS), *, version: str = "1", created: int = 1, ending: bytes = b"") -> Cell:
    """Writes the words up to `upto` and then closes the connection, or writes all and the end of the stream. `ending`
    follows the last word instead."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head(name, version) + chunked(prompt_mark(PROMPT)))
        for number in range(upto):
            writer.write(chunked(event(number, created)))
            await writer.drain()
            await asyncio.sleep(0)
        if ending:
            writer.write(chunked(ending) + b"0\r\n\r\n")
        elif upto == len(WORDS):
            writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.close()

    return answer


def refusing(status: int) -> Cell:
    async def answer(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % status)

    return answer


class Rig:
    """Cells answer in order; the last one answers all further requests."""

    def __init__(self, *cells: Cell) -> None:
        self._cells = list(cells)
        self.requests: list[Request] = []
        self._serving: set[asyncio.Task[Any]] = set()
        self.relay: RelayServer
        self.http: httpx.AsyncClient

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
                )
                request = Request(head, await reader.readexactly(length))
                self.requests.append(request)
                answer = self._cells.pop(0) if len(self._cells) > 1 else self._cells[0]
                await answer(request, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._serving.discard(serving)

    async def end(self) -> None:
        """Ends the cells that wait: the end of a request does not close a connection that a cell may still write."""
        for serving in self._serving:
            serving.cancel()
        await eventually(lambda: not self._serving)

    async def ask(self, path: str = CHAT, **more: Any) -> httpx.Response:
        body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "hi"}], **more}
        headers = {"x-request-id": "r", "x-switchyard-attempt": "short-1"}
        account = {"x-switchyard-key": "0a1b", "x-switchyard-class": "batch"}
        return await self.http.post(path, json=body, headers=headers | account)

    async def text(self, **more: Any) -> list[str]:
        """The words of one stream."""
        return words_of((await self.ask(**more)).content)

    @property
    def failed(self) -> list[RefusedAccount]:
        return list(self.relay.meter.counts().cut)

    @property
    def counts(self) -> dict[str, int]:
        """All counts, by name and reason."""
        counts = self.relay.meter.counts()
        pool = counts.pools.get("demo", PoolStreams())
        named = {"continued": pool.continued_total, "cut": pool.cut_total, "unable": pool.unable_total}
        by_reason = {f"{name}:{reason}": n for name, each in named.items() for reason, n in each.items()}
        by_reason |= {f"refused:{reason}": n for reason, n in counts.refused.items()}
        plain = {"requests": counts.requests, "open": counts.open, "kept_bytes": counts.kept_bytes}
        return plain | by_reason | {"relayed": pool.relayed_total, "repeated": pool.repeated_total}


def words_of(answer: bytes) -> list[str]:
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(each)["choices"][0]["delta"]["content"] for each in events if b'"choices"' in each]


@asynccontextmanager
async def relaying(folder: Path, *cells: Cell, max_body_bytes: int = 4 * 1024 * 1024) -> AsyncIterator[Rig]:
    rig = Rig(*cells)
    haproxy, socket = folder / "parsed.sock", folder / "1.sock"
    server = await asyncio.start_unix_server(rig.serve, str(haproxy), limit=2**24)
    rig.relay = RelayServer(socket, haproxy, max_body_bytes)
    running = asyncio.create_task(rig.relay.run())
    await eventually(socket.exists)
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://relay", timeout=30) as rig.http:
            yield rig
        await eventually(lambda: rig.counts["open"] == 0)
        assert rig.counts["kept_bytes"] == 0
    finally:
        rig.relay.stopping.set()
        await running
        server.close()
        await rig.end()
