"""One cell proxy: two listeners, the probes, the sweep of time limits, and the shutdown. It runs until SIGTERM or
SIGINT, even if the process that started it exits."""

import asyncio
import gc
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

from engine_agent.cell_proxy import endpoints, refusal
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.downstream import ClientConnection, Responder
from engine_agent.cell_proxy.engine_counters import TokenChecker, WorkReader
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.probes import Prober
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.cell_proxy.tls_connection import HANDSHAKE_S, Peer, Peers, TlsConnection
from engine_agent.cell_proxy.wire import RequestHead
from engine_agent.protocol.states import Phase
from engine_agent.protocol.ticks import seconds_to_tick
from engine_agent.protocol.watchdog import LateWakeUp

BACKLOG = 1024
_FLUSH_S = 0.2
"""To flush the last bytes at the end of the grace period."""
_IDLE_SWEEPS = 4
"""Without a request there are so many times fewer sweeps: only connections that wait for one have limits."""
_LATE_GRACE_S = 2.0
"""After this process was paused: what clients and the engine sent in the meantime is read first."""
_LAST_TOKENS_S = 1.0
"""For the engine to report the tokens of requests that were cut at shutdown."""
_LAST_SPANS_S = 1.0

_Admit = Callable[[asyncio.BaseTransport], Peer | None]
_Respond = Callable[[Cell, RequestHead, ClientConnection], Responder]


class CannotListen(OSError):
    """A port cannot be opened. The text names the option."""


class ProxyServer:
    def __init__(self, settings: ProxySettings, log: LineLog) -> None:
        self.settings = settings
        self.cell = Cell(settings, log)
        self._prober = Prober(self.cell)
        self._peers = (
            Peers(settings.identity, log, lambda: self.cell.handovers.pairs.decode_nodes) if settings.identity else None
        )
        self._clients: set[ClientConnection] = set()
        self._servers: list[asyncio.Server] = []
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises CannotListen if a port is taken, the address is not ours,
        or there is no identity to serve TLS with."""
        self._handle_signals()
        asyncio.get_running_loop().set_exception_handler(self.cell.log.crash)
        await self._listen()
        gc.freeze()  # imported objects are never freed, so no collection needs to visit them
        stop_requested = asyncio.create_task(self._stop.wait())
        spans = self.cell.spans
        loops = (
            *(asyncio.create_task(self._prober.run()), asyncio.create_task(self._sweep())),
            asyncio.create_task(TokenChecker(self.cell).run()),
            asyncio.create_task(WorkReader(self.cell).run()),
            asyncio.create_task(self.cell.cache.reader.run()),
            *((asyncio.create_task(spans.run()),) if spans else ()),
            *((asyncio.create_task(self._peers.cut_revoked(self._clients)),) if self._peers else ()),
        )
        try:
            await asyncio.wait((stop_requested, *loops), return_when=asyncio.FIRST_COMPLETED)
            broken = [task for task in loops if task.done()]
            await self._drain()
            for task in broken:  # a proxy that no longer probes must exit, so that its agent starts another
                task.result()
        finally:
            for task in (stop_requested, *loops):
                task.cancel()
            await asyncio.gather(stop_requested, *loops, return_exceptions=True)
            self._close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the proxy outlives the terminal that started it

    async def _listen(self) -> None:
        settings = self.settings
        factory = self._http(endpoints.respond_public, self._peers.admit if self._peers else None)
        await self._open("--port", settings.host, settings.port, self._over_tls(factory))
        await self._open("--admin-port", settings.admin_host, settings.admin_port, self._http(endpoints.respond_admin))
        self.cell.log.event(event="listening", cell=settings.cell, generation=settings.generation, port=settings.port)

    async def _open(self, option: str, host: str, port: int, factory: Callable[[], asyncio.Protocol]) -> None:
        try:
            server = await asyncio.get_running_loop().create_server(factory, host, port, backlog=BACKLOG)
        except OSError as error:
            raise CannotListen(f"cannot listen on {host}:{port} ({option}): {error}") from error
        self._servers.append(server)

    def _over_tls(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        if self._peers is None:
            return factory
        try:
            context = self._peers.context()
        except OSError as error:
            raise CannotListen(f"cannot serve over TLS (--identity): {error}") from error
        return partial(TlsConnection, context, factory, HANDSHAKE_S)

    def _http(self, respond: _Respond, admit: _Admit | None = None) -> Callable[[], asyncio.Protocol]:
        return partial(ClientConnection, partial(respond, self.cell), self.settings.limits, self._clients, admit)

    async def _sweep(self) -> None:
        own, begins = LateWakeUp(grace_s=_LATE_GRACE_S), self.cell.begins
        every_s = self.settings.limits.sweep_interval_s
        while True:
            begins.clear()
            if not self.cell.in_flight:
                to_tick_s = seconds_to_tick(asyncio.get_running_loop().time())
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(to_tick_s, _IDLE_SWEEPS * every_s)):
                        await begins.wait()
            if self.cell.in_flight:
                await asyncio.sleep(every_s)
            now = monotonic()
            if not own.may_enforce(now):
                continue
            for client in tuple(self._clients):
                client.check(now)
            for request in tuple(self.cell.in_flight):
                request.check(now)
            self.cell.pool.sweep(now)
            self.cell.handovers.sweep(now)
            self.cell.steer(now)

    async def _drain(self) -> None:
        """Refuses new requests, waits for those in flight, and cuts the rest at the end of the grace period."""
        self.cell.enter_phase(Phase.STOP)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self.settings.grace_s - _FLUSH_S)):
                await self.cell.idle.wait()
        for request in tuple(self.cell.in_flight):
            request.cut(refusal.stopping())
        for client in tuple(self._clients):
            client.close_when_idle()
        if self._clients:
            await asyncio.sleep(_FLUSH_S)
        if self.cell.settlements:
            await asyncio.wait(tuple(self.cell.settlements), timeout=_LAST_TOKENS_S)
        if self.cell.spans is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SPANS_S):
                    await self.cell.spans.flush()

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        for client in tuple(self._clients):
            client.abort()
        self.cell.pool.close()
        self.cell.handovers.close()
        if self.cell.spans is not None:
            self.cell.spans.close()
        self.cell.log.event(event="stopped", cell=self.settings.cell)
        self.cell.log.flush()
