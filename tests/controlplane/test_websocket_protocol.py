"""What uvicorn does with a connection that wants to be a WebSocket, before any application sees it."""

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from controlplane.asgi import hub
from controlplane.websocket_protocol import WebSocketProtocol
from fleet.agents.consumers.limits import CredentialFilter, CredentialVerdict

HEAD = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HEAD += b"sec-websocket-version: 13\r\n"
STRANGER = b"authorization: Bearer sw_00000000_" + b"5e" * 24 + b"\r\n"


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
    credential_filter.add_prefixes(["00000000"])
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
