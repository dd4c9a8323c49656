"""One relay process: its listener for HAProxy, the sweep of time limits, its counts, and its end."""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from engine_agent.cell_proxy.downstream import ClientConnection, Responder
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.settings import Limits
from engine_agent.cell_proxy.wire import LocalResponse, RequestHead, response_bytes
from engine_agent.protocol.continuation import COUNTS_PATH
from engine_agent.relay.exchange import Exchange
from engine_agent.relay.meter import RelayMeter
from engine_agent.relay.run import HaproxyPool

log = logging.getLogger(__name__)

SWEEP_S: Final = 0.25
BACKLOG: Final = 1024
FINISH_WITHIN_S: Final = 900.0
"""How long a relay that was replaced finishes its streams."""


class Counts:
    """Answers a request for the counts. Implements `Responder`."""

    def __init__(self, meter: RelayMeter, head: RequestHead, client: ClientConnection) -> None:
        self._meter, self._head, self._client = meter, head, client

    def feed(self, data: bytes, *, complete: bool) -> None:
        if not complete:
            return
        keep_alive = self._client.may_keep_alive()
        reply = LocalResponse(200, msgspec.json.encode(self._meter.counts()))
        self._client.write(response_bytes(reply, keep_alive=keep_alive))
        self._client.answered(keep_alive=keep_alive)

    def refuse(self, refusal: Refusal) -> None:
        self._client.abort()

    def client_gone(self) -> None: ...

    def download_paused(self) -> None: ...

    def download_resumed(self) -> None: ...

    def crashed(self, error: Exception) -> None:
        self._client.abort()


class RelayServer:
    """Listens at `socket`, which gets its name when it accepts requests, and sends them to the socket `haproxy`."""

    def __init__(self, socket: Path, haproxy: Path, max_body_bytes: int) -> None:
        self._socket = socket
        self.meter = RelayMeter()
        self._pool = HaproxyPool(haproxy)
        self._limits = Limits(max_body_bytes=max_body_bytes, idle_timeout_s=3600.0)
        self._clients: set[ClientConnection] = set()
        self._exchanges: set[Exchange] = set()
        self._has_clients = asyncio.Event()
        """Without any there are no time limits to enforce, so an idle relay does not wake up."""
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then finishes its streams. Raises OSError if it cannot listen."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        own = self._socket.with_name(f"{self._socket.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        server = await loop.create_unix_server(self._connection, str(own), backlog=BACKLOG)
        own.rename(self._socket)
        log.info("relays at %s", self._socket)
        sweep = asyncio.create_task(self._sweep())
        try:
            await self.stopping.wait()
            server.close()
            for client in tuple(self._clients):
                client.close_when_idle()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINISH_WITHIN_S):
                    while self._clients:  # noqa: ASYNC110 - connections end in several places
                        await asyncio.sleep(SWEEP_S)
        finally:
            sweep.cancel()
            self._pool.close()

    def _connection(self) -> ClientConnection:
        self._has_clients.set()
        return ClientConnection(self._respond, self._limits, self._clients)

    def _respond(self, head: RequestHead, client: ClientConnection) -> Responder:
        if head.method == b"GET" and head.path == COUNTS_PATH.encode():
            return Counts(self.meter, head, client)
        exchange = Exchange(self._pool, self.meter, head, client)
        self._exchanges.add(exchange)
        return exchange

    async def _sweep(self) -> None:
        while True:
            await self._has_clients.wait()
            await asyncio.sleep(SWEEP_S)
            if not self._clients:
                self._has_clients.clear()
            now = monotonic()
            self._exchanges = {exchange for exchange in self._exchanges if not exchange.is_over}
            for exchange in self._exchanges:
                exchange.check(now)
            for client in tuple(self._clients):
                client.check(now)
            self._pool.sweep(now)
