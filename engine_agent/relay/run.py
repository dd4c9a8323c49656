"""One run of a request at a cell, by a connection to the HAProxy of this ingress. Its socket is a file."""

import asyncio
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Final, Protocol

from engine_agent.cell_proxy.upstream import EngineConnection, EnginePool, UpstreamFault
from engine_agent.cell_proxy.wire import ResponseHead
from engine_agent.relay.marked_stream import MarkedStream

CONNECT_WITHIN_S: Final = 2.0
IDLE_S: Final = 30.0
"""Shorter than HAProxy keeps an idle connection (60 s)."""


class HaproxyPool(EnginePool):
    """The connections to one socket."""

    def __init__(self, socket: Path) -> None:
        super().__init__("", 0, connect_timeout_s=CONNECT_WITHIN_S, idle_s=IDLE_S, on_lost=lambda: None)
        self._socket = str(socket)

    async def connect(self) -> EngineConnection:
        """Raises OSError if HAProxy does not accept the connection in time."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_WITHIN_S):
            _, connection = await loop.create_unix_connection(lambda: EngineConnection(self), self._socket)
        return connection


class Receiving(Protocol):
    def received(self, run: "Run", body: bytes, *, complete: bool) -> None:
        """The bytes of one read, `complete` with the last. The head of the answer comes before."""

    def run_failed(self, run: "Run", fault: UpstreamFault) -> None:
        """The connection ended before the answer was complete."""


class Run:
    """One run of the request at a cell. Receives for one connection, and passes everything to its exchange."""

    def __init__(self, exchange: Receiving, stream: MarkedStream | None) -> None:
        self._exchange = exchange
        self.stream = stream
        self.connection: EngineConnection | None = None
        self.response: ResponseHead | None = None
        self.last_byte_at = monotonic()
        self.held: deque[tuple[bytes, bool]] = deque()
        """Pieces that arrived while another run was the client's, and whether they are the last."""

    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        self.last_byte_at = monotonic()
        if head is not None:
            self.response = head
        self._exchange.received(self, body, complete=complete)

    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        self._exchange.run_failed(self, fault)

    @property
    def is_connected(self) -> bool:
        return self.connection is not None

    def header(self, name: bytes) -> bytes:
        return dict(self.response.headers).get(name, b"") if self.response is not None else b""

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause_reading()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume_reading()

    def end(self, *, keeps: bool = False) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            (connection.release if keeps else connection.abort)()
