"""HTTP connections on real sockets in front of an application: deadlines of heads, and who makes room for whom."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest
from uvicorn.server import ServerState

from controlplane.connection_door import HANDSHAKES_LEAST, PACE_OVER_S, ConnectionDoor, ConnectionLimits
from controlplane.http_connections import HttpConnectionLimit, http_connections
from controlplane.web import server_config
from tests.engine_agent.fake_control_plane import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
REQUEST = b"GET /whole HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
request_of = ContextVar("request_of", default="")


class Listener:
    """A listener whose application answers `/whole`, and `/slow` once it may. The answer to `/long` is complete for its
    client before it ends."""

    def __init__(self, limits: ConnectionLimits, head_s: float) -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        self.port = bound.getsockname()[1]
        config = server_config(self._answer)
        config.load()
        self.limit = HttpConnectionLimit(limits.http, head_s)
        self.state = ServerState()
        make = http_connections(config, self.state, self.limit)
        self.door = ConnectionDoor(bound, make, limits, is_unlimited=lambda address: False)
        self.door.start(100)
        self.may_answer = asyncio.Event()
        self.slow = 0
        self.inherited: list[str] = []

    async def _answer(self, scope: Any, _: Any, send: Any) -> None:
        self.inherited.append(request_of.get())
        request_of.set(scope["path"])
        if scope["path"] == "/slow":
            self.slow += 1
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": scope["path"] == "/long"})
        if scope["path"] == "/long":
            await self.may_answer.wait()
            await send({"type": "http.response.body"})

    async def connected(self, said: bytes = b"", address: str = "127.0.0.1") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        writer.write(said)
        return reader, writer


@asynccontextmanager
async def listening(limits: ConnectionLimits, head_s: float = 600.0) -> AsyncIterator[Listener]:
    listener = Listener(limits, head_s)
    try:
        yield listener
        await eventually(lambda: not listener.door.open and not listener.limit.count)
    finally:
        listener.door.close()
        await listener.door.wait_closed()


async def said_until_its_end(streams: Streams) -> bytes:
    reader, writer = streams
    said = b""
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            while piece := await reader.read(4096):
                said += piece
    writer.close()
    return said


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost:",
        b"\r\n",
        REQUEST + b"\r\n",
        REQUEST + b"GET / HTTP/1.1\r\n",
        b"POST /whole HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" + b"x" * 50,
    ],
)
async def test_a_connection_ends_that_does_not_finish_the_head_of_a_request(said: bytes) -> None:
    async with listening(ConnectionLimits(), head_s=0.2) as listener:
        answer = await said_until_its_end(await listener.connected(said))
        assert answer.count(b"200 OK") == (b" /whole" in said)


async def test_bytes_that_trickle_in_do_not_move_the_deadline() -> None:
    async with listening(ConnectionLimits(), head_s=0.5) as listener:
        reader, writer = await listener.connected(REQUEST)
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(4096), 0.05)
        writer.close()


async def test_the_connection_that_was_silent_the_longest_makes_room_and_those_that_ask_stay() -> None:
    async with listening(ConnectionLimits(http=3)) as listener:
        asking = await listener.connected(b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await eventually(lambda: listener.slow)
        silent = [await listener.connected() for _ in range(2)]
        await eventually(lambda: listener.limit.count == 3)
        fresh = await listener.connected(REQUEST)
        assert b"200 OK" in await fresh[0].readuntil(b"ok")
        assert await said_until_its_end(silent[0]) == b""
        listener.may_answer.set()
        assert b"200 OK" in await said_until_its_end(asking)
        for _, writer in (silent[1], fresh):
            writer.close()


async def test_a_new_connection_is_closed_where_all_others_wait_for_answers() -> None:
    async with listening(ConnectionLimits(http=1)) as listener:
        asking = await listener.connected(b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await eventually(lambda: listener.slow)
        assert await said_until_its_end(await listener.connected(REQUEST)) == b""
        listener.may_answer.set()
        assert b"200 OK" in await said_until_its_end(asking)


async def test_one_network_has_so_many_connections_and_others_none_the_less() -> None:
    async with listening(ConnectionLimits(per_network=2)) as listener:
        silent = [await listener.connected() for _ in range(2)]
        await eventually(lambda: listener.door.open["127.0.0.1"] == 2)
        assert await said_until_its_end(await listener.connected(REQUEST)) == b""
        elsewhere = await listener.connected(REQUEST, address="127.0.0.2")
        assert b"200 OK" in await elsewhere[0].readuntil(b"ok")
        for _, writer in (*silent, elsewhere):
            writer.close()


async def test_both_listeners_leave_half_of_the_open_files() -> None:
    assert ConnectionLimits.of_files(512) == ConnectionLimits(http=128, per_network=64, handshakes=128, waiting=64)
    assert ConnectionLimits.of_files(10**6) == ConnectionLimits()


async def test_who_still_introduces_himself_has_a_place_of_a_handshake() -> None:
    async with listening(ConnectionLimits(handshakes=2)) as listener:
        pending_hellos = 2
        listener.door.pending_hellos = lambda: pending_hellos
        reader, writer = await listener.connected(REQUEST)
        await eventually(lambda: listener.door.open)
        assert not listener.limit.count, "nothing is done for it yet"
        pending_hellos = 1
        listener.door.admit_waiting()
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.close()


async def test_a_connection_waits_for_a_place_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.connection_door.WAITS_FOR_S", 0.05)
    async with listening(ConnectionLimits(handshakes=0)) as listener:
        assert await said_until_its_end(await listener.connected(REQUEST)) == b""


async def test_only_so_many_connections_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.connection_door.WAITS_FOR_S", 600.0)
    async with listening(ConnectionLimits(handshakes=0, waiting=1)) as listener:
        first = await listener.connected(REQUEST)
        await eventually(lambda: listener.door.open)
        assert await said_until_its_end(await listener.connected(REQUEST)) == b""
        listener.door.close()
        assert await said_until_its_end(first) == b""


async def test_on_a_slow_host_fewer_handshakes_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("controlplane.connection_door.monotonic", lambda: now_s)
    async with listening(ConnectionLimits(handshakes=500)) as listener:
        door, pending_hellos = listener.door, HANDSHAKES_LEAST
        door.pending_hellos = lambda: pending_hellos

        def is_full() -> bool:
            return door.is_full

        assert is_full(), "nothing is known about its pace"
        door._ended_s.extend([now_s] * 400)
        assert not is_full()
        pending_hellos = 200
        assert is_full()
        door._ended_s.extend([now_s] * 10_000)
        assert not is_full()
        pending_hellos = 500
        assert is_full()
        now_s += PACE_OVER_S + 1
        pending_hellos = HANDSHAKES_LEAST
        assert is_full()


async def test_a_request_before_the_end_of_the_last_answer_shares_nothing_with_it() -> None:
    async with listening(ConnectionLimits()) as listener:
        reader, writer = await listener.connected(REQUEST.replace(b"whole", b"long"))
        await reader.readuntil(b"ok")
        writer.write(REQUEST)
        await eventually(lambda: any(getattr(each, "pipeline", None) for each in listener.state.connections))
        listener.may_answer.set()
        await reader.readuntil(b"ok")
        writer.close()
    assert listener.inherited == ["", ""]
