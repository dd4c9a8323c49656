"""The public port of a proxy in the test's event loop: no probes run, and the test sets the clock."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

from engine_agent.cell_proxy import endpoints
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.downstream import ClientConnection
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.settings import Limits, ProxySettings
from tests.engine_agent.cell_proxy.engine import Engine, Script, answer_one_token, running_engine

LIMITS = Limits()


class LocalProxy:
    """A proxy's public port and its parts; `at` sets the clock."""

    def __init__(self, engine: Engine, cell: Cell, clients: set[ClientConnection], port: int) -> None:
        self.engine = engine
        self.cell = cell
        self.clients = clients
        self.port = port

    def at(self, seconds_from_now: float) -> None:
        now = monotonic() + seconds_from_now
        for client in tuple(self.clients):
            client.check(now)
        for each in tuple(self.cell.in_flight):
            each.check(now)

    async def moment(self) -> None:
        await asyncio.sleep(0)

    async def send(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        return reader, writer


@asynccontextmanager
async def proxy_of(
    script: Script = answer_one_token, *, max_prompt_tokens: int | None = None, replays: bool = False
) -> AsyncIterator[LocalProxy]:
    async with running_engine(script) as engine:
        address = ("127.0.0.1", 0, 0, "127.0.0.1", engine.port)
        settings = ProxySettings(
            *("n-1", "c-1", 1, *address, "tiny", 4),
            adapters=frozenset({"acme/tuned"}),
            max_prompt_tokens=max_prompt_tokens,
            replays=replays,
            limits=LIMITS,
        )
        null = os.open(os.devnull, os.O_WRONLY)
        cell = Cell(settings, LineLog(null, requests=False))
        cell.health.answered(monotonic(), 1.0)
        cell.health.token_seen(monotonic())
        clients: set[ClientConnection] = set()
        make: Callable[[], ClientConnection] = partial(
            ClientConnection, partial(endpoints.respond_public, cell), LIMITS, clients
        )
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        try:
            yield LocalProxy(engine, cell, clients, server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for client in tuple(clients):
                client.abort()
            cell.pool.close()
            os.close(null)
