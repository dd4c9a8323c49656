"""What uvicorn does with a connection that wants to be a WebSocket, before any application sees it."""

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from controlplane.asgi import hub
from controlplane.websocket_protocol import SHORT_FRAMES_MOST, WebSocketProtocol, missing_bytes
from fleet.agents.consumers.limits import CredentialFilter, CredentialVerdict

HEAD = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HEAD += b"sec-websocket-version: 13\r\n"
STRANGER = b"authorization: Bearer sw_00000000000000_" + b"5e" * 24 + b"\r\n"


class Wire(asyncio.Transport):
    """The other end of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = self.aborted = False

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Echo:
    """An application that accepts connections and records its messages."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received.append(scope["path"])
        await receive()
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] == "websocket.receive":
            self.received.append(event.get("text") or event.get("bytes"))


def connection(application: Any) -> tuple[WebSocketProtocol, Wire]:
    config = Config(application, interface="asgi3", lifespan="off", log_config=None, ws_per_message_deflate=False)
    wire = Wire()
    protocol = WebSocketProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(wire)
    return protocol, wire


@pytest.mark.asyncio
@pytest.mark.parametrize("header", [b"", b"authorization: Bearer nonsense\r\n", b"authorization: Basic YTpi\r\n"])
async def test_a_knock_without_a_credential_is_refused_before_the_handshake(header: bytes) -> None:
    application = Echo()
    protocol, wire = connection(application)
    protocol.data_received(b"GET /agents/ws HTTP/1.1\r\n" + HEAD + header + b"\r\n")
    await asyncio.sleep(0)
    assert wire.sent.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert wire.closed
    assert application.received == []


@pytest.mark.asyncio
async def test_who_answers_no_ping_is_gone_at_once() -> None:
    """Closing politely would wait for a host without power."""
    protocol, wire = connection(Echo())
    protocol.keepalive_timeout()
    assert wire.aborted


@pytest.mark.asyncio
async def test_a_flood_of_knocks_is_told_to_come_later_and_a_known_agent_gets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credential_filter = CredentialFilter(now=lambda: 0.0)
    monkeypatch.setattr(hub, "credential_filter", credential_filter)
    application = Echo()
    request = b"GET /agents/ws?again HTTP/1.1\r\n" + HEAD + STRANGER + b"\r\n"
    while credential_filter.check(STRANGER.decode()[15:].strip()) is CredentialVerdict.LOOKED_UP:
        pass
    protocol, wire = connection(application)
    protocol.data_received(request)
    assert wire.sent.startswith(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n")
    credential_filter.add_prefixes([14 * "0"])
    protocol, wire = connection(application)
    protocol.data_received(request)
    await asyncio.sleep(0)
    assert wire.sent.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert application.received == ["/agents/ws"]
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_an_answer_in_place_of_a_websocket_is_no_error_of_ours() -> None:
    """Uvicorn logs one for a handshake that its application left incomplete."""

    async def refuses(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.http.response.start", "status": 503, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"come again"})

    protocol, wire = connection(refuses)
    protocol.data_received(b"GET /live HTTP/1.1\r\n" + HEAD + b"\r\n")
    await asyncio.gather(*protocol.tasks)
    assert wire.sent.startswith(b"HTTP/1.1 503 ")
    assert protocol.handshake_complete


@pytest.mark.asyncio
async def test_a_connection_that_is_being_closed_does_not_stop_web_from_ending() -> None:
    protocol, wire = connection(Echo())
    protocol.data_received(b"GET /live HTTP/1.1\r\n" + HEAD + b"\r\n")
    await asyncio.sleep(0)
    protocol.conn.send_close(1000)
    protocol.shutdown()
    assert wire.closed
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_only_a_client_that_sends_nothing_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    pings: list[str] = []
    monkeypatch.setattr(WebSocketsSansIOProtocol, "send_keepalive_ping", lambda protocol: pings.append("ping"))
    protocol, _ = connection(Echo())
    protocol.data_received(b"GET /live HTTP/1.1\r\n" + HEAD + b"\r\n")
    protocol.send_keepalive_ping()
    assert not pings
    assert protocol.ping_timer is not None
    protocol.ping_timer.cancel()
    for _ in range(2):
        protocol.send_keepalive_ping()
    assert pings == ["ping", "ping"]


BEAT = b'{"type":"heartbeat","seq":7}'


def frame(message: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    return Frame(opcode, message, fin).serialize(mask=True)


async def opened(takes: bool = True) -> tuple[WebSocketProtocol, Wire, Echo, list[str]]:
    """A connection that expects `BEAT`, and the heartbeats that it took."""
    application, taken = Echo(), list[str]()
    protocol, wire = connection(application)
    protocol.data_received(b"GET /live HTTP/1.1\r\n" + HEAD + b"\r\n")
    await settle()
    application.received.clear()
    wire.sent = b""

    def take() -> bool:
        taken.append("beat")
        return takes

    protocol.expect(BEAT, take)
    return protocol, wire, application, taken


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_the_expected_message_is_taken_before_the_application() -> None:
    protocol, _, application, taken = await opened()
    protocol.data_received(frame(BEAT))
    protocol.data_received(frame(b"a report"))
    protocol.data_received(frame(BEAT))
    await settle()
    assert (taken, application.received) == (["beat", "beat"], ["a report"])
    protocol.connection_lost(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("other", [BEAT[:-1] + b"8", BEAT + b" ", b"", b"x" * 200])
async def test_other_messages_reach_the_application(other: bytes) -> None:
    protocol, _, application, taken = await opened()
    protocol.data_received(frame(other))
    protocol.data_received(frame(BEAT, Opcode.BINARY))
    await settle()
    assert taken == []
    assert application.received[-1] == BEAT
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_a_message_that_is_not_taken_reaches_the_application() -> None:
    protocol, _, application, _ = await opened(takes=False)
    protocol.data_received(frame(BEAT))
    await settle()
    assert application.received == [BEAT.decode()]
    protocol.connection_lost(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [10, 125, 126, 70_000])
@pytest.mark.parametrize("cut", [1, 3, 7, -1])
async def test_bytes_within_another_message_are_no_heartbeat(size: int, cut: int) -> None:
    """However a message is cut, what follows it is received in order."""
    protocol, _, application, taken = await opened()
    hidden = frame(BEAT)
    long = frame(hidden + b"x" * size, Opcode.BINARY)
    start = long.index(long[-1:]) if cut == -1 else cut
    protocol.data_received(long[:start])
    protocol.data_received(long[start:])
    protocol.data_received(frame(BEAT) + frame(b"last"))
    await settle()
    assert (application.received[0], application.received[-1]) == (hidden + b"x" * size, "last")
    assert len(taken) + application.received.count(BEAT.decode()) == 1
    protocol.data_received(frame(BEAT))
    await settle()
    assert len(taken) + application.received.count(BEAT.decode()) == 2
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_frames_that_were_read_together_are_handled_in_order() -> None:
    """Heartbeats of one read count once."""
    protocol, wire, application, taken = await opened()
    pings = [frame(payload, Opcode.PING) for payload in (b"one", b"two")]
    protocol.data_received(pings[0] + frame(BEAT) + frame(BEAT) + pings[1] + frame(b"a report") + frame(b"another"))
    await settle()
    assert (taken, application.received) == (["beat"], ["a report", "another"])
    assert wire.sent == b"".join(Frame(Opcode.PONG, payload).serialize(mask=False) for payload in (b"one", b"two"))
    protocol.data_received(frame(BEAT) + frame(b"cut")[:4])
    protocol.data_received(frame(b"cut")[4:])
    protocol.connection_lost(None)
    await settle()
    assert len(taken) == 2


@pytest.mark.asyncio
async def test_a_flood_of_heartbeats_reaches_the_limits_of_messages() -> None:
    protocol, _, application, taken = await opened()
    protocol.data_received(frame(BEAT) * (SHORT_FRAMES_MOST + 2))
    await settle()
    assert (taken, application.received) == (["beat"], [BEAT.decode()] * 2)
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_a_heartbeat_between_the_fragments_of_a_message_is_an_error_of_the_protocol() -> None:
    protocol, wire, application, taken = await opened()
    protocol.data_received(frame(b"first", fin=False))
    protocol.data_received(frame(BEAT))
    await settle()
    assert (taken, application.received) == ([], [])
    assert wire.closed
    protocol.connection_lost(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("payload", [b"", b"\x01\x02\x03\x04", b"p" * 125])
async def test_a_ping_is_answered_with_its_payload(payload: bytes) -> None:
    protocol, wire, _, _ = await opened()
    protocol.data_received(frame(payload, Opcode.PING))
    assert wire.sent == Frame(Opcode.PONG, payload).serialize(mask=False)
    protocol.connection_lost(None)


@pytest.mark.asyncio
async def test_a_client_that_reads_no_answers_gets_none() -> None:
    protocol, wire, _, _ = await opened()
    protocol.pause_writing()
    protocol.data_received(frame(b"ping", Opcode.PING))
    assert wire.sent == b""
    protocol.resume_writing()
    protocol.data_received(frame(b"ping", Opcode.PING))
    assert wire.sent.endswith(b"ping")
    protocol.connection_lost(None)


def test_missing_bytes_counts_to_the_end_of_a_frame() -> None:
    for size in (0, 1, 125, 126, 65_535, 65_536):
        whole = frame(b"x" * size)
        assert missing_bytes(whole, 0) == 0
        assert missing_bytes(whole + whole, 0) == 0
        assert missing_bytes(whole[:-1], 0) == 1
        assert missing_bytes(whole[-1:], 1) == 0
        assert missing_bytes(whole[:1], 0) is None
