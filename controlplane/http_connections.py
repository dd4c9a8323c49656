"""HTTP connections of web's two listeners, on top of uvicorn's parser. Each request head has a deadline, and there is a
maximum number of connections that are no WebSockets. Beyond it the connection that has been silent the longest is
closed, so clients that send requests get in among any number of connections that send nothing.

Bodies have other deadlines (`controlplane.request_bodies`)."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from fleet.agents.services.enrolment import PEER_CERTIFICATE


class HttpConnectionLimit:
    """The connections of one listener that are no WebSockets."""

    def __init__(self, most: int, head_s: float) -> None:
        self._most, self.head_s = most, head_s
        self.count = 0
        self._silent: dict[HttpConnection, None] = {}
        """Those without a whole request head, the oldest first."""

    def enter(self, connection: "HttpConnection") -> None:
        self.count += 1
        self.is_silent(connection)
        if self.count > self._most:
            oldest = next(iter(self._silent))
            self.speaks(oldest)
            oldest.transport.abort()

    def is_silent(self, connection: "HttpConnection") -> None:
        self._silent[connection] = None

    def speaks(self, connection: "HttpConnection") -> None:
        self._silent.pop(connection, None)

    def leave(self, connection: "HttpConnection") -> None:
        self.speaks(connection)
        self.count -= 1


class HttpConnection(HttpToolsProtocol):
    """A connection until it is a WebSocket. It limits requests only; answers may take as long as they do."""

    cycle: Any
    """Uvicorn's current request with its response; None before the first."""

    def __init__(self, *, limit: HttpConnectionLimit, ended: Callable[[], None], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limit, self._ended = limit, ended
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_deadline()
        self._limit.enter(self)

    def data_received(self, data: bytes) -> None:
        # Between requests uvicorn ends its own wait at the first byte, which may be the first of no request.
        if self.cycle is None or self.cycle.response_complete:
            self._begin_deadline()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._begin_deadline()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_deadline()
        self._limit.speaks(self)
        if (encrypted := self.transport.get_extra_info("ssl_object")) is not None:
            cast(Any, self.scope)[PEER_CERTIFICATE] = encrypted.getpeercert() or None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._limit.is_silent(self)

    def handle_websocket_upgrade(self) -> None:
        self._limit.leave(self)
        super().handle_websocket_upgrade()
        socket = cast(Any, self.transport.get_protocol())  # a WebSocketProtocol
        socket.ended, socket.certificate = self._ended, cast(Any, self.scope).get(PEER_CERTIFICATE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        self._limit.leave(self)
        self._ended()
        super().connection_lost(exc)

    def _begin_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limit.head_s, self.transport.abort)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def http_connections(
    config: uvicorn.Config, state: ServerState, limit: HttpConnectionLimit
) -> Callable[[Callable[[], None]], HttpConnection]:
    """Makes the connections that `controlplane.connection_door` accepts."""

    def made(ended: Callable[[], None]) -> HttpConnection:
        return HttpConnection(limit=limit, ended=ended, config=config, server_state=state, app_state={})

    return made
