"""Uvicorn's WebSocket protocol. Rejects connections of agents with unknown credentials before the handshake, and closes
a connection whose text is not UTF-8 without a traceback in the log. Heartbeats and pings, which are nearly all frames
of an agent, are handled here without the parser and the application."""

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode
from websockets.protocol import OPEN
from websockets.speedups import apply_mask

from controlplane.asgi import hub
from fleet.agents.consumers.limits import RETRY_AFTER_S, CredentialVerdict
from fleet.agents.consumers.socket import EXPECT_MESSAGE
from fleet.agents.services.enrolment import PEER_CERTIFICATE

AGENTS_DOOR = (b"GET /agents/ws HTTP/1.1\r\n", b"GET /agents/ws?")
"""Other spellings of the path reach the socket itself, which judges the same."""
HEARD_FOR_PINGS = 3
"""Intervals of pings for which a client that has sent something counts as alive."""
_TEXT, _PING, _PONG = 0x81, 0x89, 0x8A
"""First bytes of frames that are whole messages."""
_MASKED = 0x80
_SHORT_MOST = 125
"""Bytes of a message whose length is in the second byte of its frame; also the most of a ping."""
_HEAD_BYTES = 6
"""Of a client's short frame: two, and four of its mask."""
SHORT_FRAMES_MOST = 8
"""Of one read that are handled without the parser."""
_END = b"Connection: close\r\nContent-Length: 0\r\n\r\n"
ANSWERS = {
    CredentialVerdict.REFUSED: b"HTTP/1.1 403 Forbidden\r\n" + _END,
    CredentialVerdict.LATER: f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {RETRY_AFTER_S}\r\n".encode() + _END,
}


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """What uvicorn gives each connection that wants to be a WebSocket."""

    ended: Callable[[], None] = staticmethod(lambda: None)
    """Whom to tell once the connection has ended."""
    certificate: Any = None
    """The client's certificate as `ssl` decodes it; None if it showed none."""
    _was_heard = False
    """Whether the client has sent anything since the last ping was due."""
    _expected = b""
    _take: Callable[[], bool] = staticmethod(lambda: False)
    _missing: int | None = 0
    """Bytes until the end of the frame that the parser is reading, or None if a head arrived in two parts."""

    def expect(self, message: bytes, take: Callable[[], bool]) -> None:
        """From now on `take` is called for a text message of exactly these bytes. If it returns True, the application
        does not receive the message."""
        self._expected, self._take = message, take

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first call brings the whole head of the request, names in lower case."""
        self._was_heard = True
        if not self.handshake_initiated and data.startswith(AGENTS_DOOR):
            answer = ANSWERS.get(hub.credential_filter.check(_authorization(data), counts=False))
            if answer is not None:
                self.transport.write(answer)
                self.transport.close()
                return
        if self._missing == 0 and not (data := self._after_short_frames(data)):
            return
        if self.handshake_initiated:
            self._missing = None if self._missing is None else missing_bytes(data, self._missing)
        super().data_received(data)

    def _after_short_frames(self, data: bytes) -> bytes:
        """Handles the expected messages and pings at the beginning of `data`, and returns the rest. A client that was
        not read for a while has sent several. Further ones than `SHORT_FRAMES_MOST` count towards its limits."""
        if self.frames or self.conn.state is not OPEN:
            return data
        at, is_taken = 0, False
        for _ in range(SHORT_FRAMES_MOST):
            if at + _HEAD_BYTES > len(data):
                break
            size = data[at + 1] ^ _MASKED  # above 125 if the length is elsewhere or there is no mask
            start, end = at + _HEAD_BYTES, at + _HEAD_BYTES + size
            if size > _SHORT_MOST or end > len(data):
                break
            if data[at] == _TEXT:
                if size != len(self._expected) or apply_mask(data[start:end], data[at + 2 : start]) != self._expected:
                    break
                if not (is_taken or self._take()):
                    break
                is_taken = True
            elif data[at] != _PING:
                break
            elif self.writable.is_set():  # else the client reads no answers, and each would take memory
                self.transport.write(bytes((_PONG, size)) + apply_mask(data[start:end], data[at + 2 : start]))
            at = end
        return data[at:] if at else data

    def send_receive_event_to_app(self) -> None:
        """Handle a whole message. Invalid text closes the connection, as the standard says; uvicorn would log it as an
        internal error."""
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(CloseCode.INVALID_DATA)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Handle bytes that are no WebSocket frame. Before the end of the handshake there is no close frame to send,
        although uvicorn expects one."""
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.PROTOCOL_ERROR})
        self.close_sent = True
        self.transport.close()

    def send_keepalive_ping(self) -> None:
        """A client that sends on its own, such as an agent, needs no ping to show that it is alive. Looking less often
        saves a tenth of the CPU time of an idle agent's connection."""
        if self._was_heard and self.ping_interval:
            self._was_heard = False
            self.ping_timer = self.loop.call_later(HEARD_FOR_PINGS * self.ping_interval, self.send_keepalive_ping)
        else:
            super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        """Abort a connection that answers no ping. A TLS shutdown would wait for its answer, and delay the report of a
        dead host by half a minute."""
        super().keepalive_timeout()
        self.transport.abort()

    def shutdown(self) -> None:
        """At the end of web. A connection whose other side has begun to close it must not keep others open."""
        try:
            super().shutdown()
        except InvalidState:
            self.transport.close()

    async def send(self, message: Any) -> None:
        """A whole answer in place of a WebSocket completes the handshake; uvicorn would log an error after it."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    async def run_asgi(self) -> None:
        """Adds the client's certificate and `expect` to the scope of the application."""
        cast(Any, self.scope).update({PEER_CERTIFICATE: self.certificate, EXPECT_MESSAGE: self.expect})
        await super().run_asgi()


def missing_bytes(data: bytes, missing: int) -> int | None:
    """How many bytes of the last frame of a client are missing at the end of `data`, of whose first frame `missing`
    are left. Returns None if the data end within the head of a frame."""
    at = missing
    while at < len(data):
        head = data[at : at + 10]
        if len(head) < 2:
            return None
        length, extended = head[1] & 0x7F, {126: 2, 127: 8}.get(head[1] & 0x7F, 0)
        if len(head) < 2 + extended:
            return None
        at += _HEAD_BYTES + extended + (int.from_bytes(head[2 : 2 + extended]) if extended else length)
    return at - len(data)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _authorization(head: bytes) -> str:
    _, _, rest = head.partition(b"\r\nauthorization: ")
    return rest.partition(b"\r\n")[0].decode("latin-1")
