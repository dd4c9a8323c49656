"""Reads the loads of cells from their proxies, and applies the limits and weights of `steering` to HAProxy. Only
ingresses that share a region need it: the count of a single one is exact.

It queries `GET /healthz` of each cell over a kept connection, often while a pool is busy and rarely while it is idle. A
cell that does not answer, or has no load of this version, keeps its limit and weight; HAProxy's health check decides
whether it gets requests. Losing this feed changes nothing else."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_agent.ingress.cache_feed import CellAddress
from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.desired import DesiredHaproxy, Server, ServerKey
from engine_agent.ingress.headers import INGRESS
from engine_agent.ingress.runtime_api import steer_servers
from engine_agent.ingress.steering import SeenCell, Steered, steer
from engine_agent.ingress.supervisor import HaproxySupervisor
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.protocol.proxy_messages import BadLoad, CellLoad, decode_load

HEALTH_PATH = "/healthz"
BUSY_EVERY_S = 0.1
"""Between two reports of a cell while its pool is busy. An answer takes seconds, so few end or begin in between
(docs/bench/shared_load.md)."""
CALM_EVERY_S = 0.5
IDLE_EVERY_S = 2.0
"""While no cell of the pool has a request."""
BUSY_SHARE = 0.4
"""Of a cell's places in use. Below half, steering leaves every ingress more than its part."""
MAX_REPORTS_PER_S = 200
"""Of all cells: about 5 % of a processor. With more than 20 busy cells, reports become rarer."""
ANSWER_LIMIT_S = 1.0
RETRY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Cell:
    """A polled cell; `load` is its last report, the one of number `turn`."""

    server: Server
    load: CellLoad | None = None
    turn: int = 0
    is_new: bool = False
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Pool:
    cells: dict[ServerKey, _Cell] = field(default_factory=dict)
    pause_s: float = CALM_EVERY_S


class LoadFeed:
    """The loads of the cells of one ingress. `context` makes TLS contexts; None: plain links."""

    def __init__(self, ingress: str, haproxy: HaproxySupervisor, context: Callable[[], ssl.SSLContext] | None) -> None:
        self._ingress = ingress
        self._haproxy = haproxy
        self._context = context
        self._pools: dict[str, _Pool] = {}
        self._ingresses: tuple[str, ...] = ()
        self._followed: DesiredHaproxy | None = None
        self._news = asyncio.Event()
        """Reports that are not applied."""
        self.reports_total = 0
        self.changes_total = 0

    def follow(self, desired: DesiredHaproxy) -> None:
        """Polls the cells of this state from now on, if several ingresses share them."""
        if desired is self._followed:
            return
        self._followed = desired
        self._ingresses = desired.ingresses
        wanted = _shared_cells(desired, self._ingress)
        for pool in self._pools.values():
            for key, cell in tuple(pool.cells.items()):
                if wanted.get(key) != cell.server:
                    self._forget(pool, key)
        for key, server in wanted.items():
            pool = self._pools.setdefault(server.backend, _Pool())
            if key not in pool.cells:
                cell = pool.cells[key] = _Cell(server)
                cell.task = asyncio.get_running_loop().create_task(self._poll(pool, cell))
        self._pools = {name: pool for name, pool in self._pools.items() if pool.cells}

    async def run(self) -> None:
        """Applies reports until cancelled."""
        try:
            while True:
                await self._news.wait()
                await asyncio.sleep(BUSY_EVERY_S)  # for the reports of other cells
                self._news.clear()
                await self._apply()
        finally:
            for pool in self._pools.values():
                for key in tuple(pool.cells):
                    self._forget(pool, key)

    def _forget(self, pool: _Pool, key: ServerKey) -> None:
        task = pool.cells.pop(key).task
        if task is not None:
            task.cancel()
        self._haproxy.steered.pop(key, None)

    async def _apply(self) -> None:
        """A change that HAProxy did not take is made by the next pass of its supervisor."""
        changes: dict[ServerKey, Steered] = {}
        for pool in self._pools.values():
            changes |= self._changes_of(pool)
        if not changes or self._haproxy.running is None:
            return
        self.changes_total += len(changes)
        try:
            await steer_servers(changes, self._haproxy.process.admin)
        except (CommandRefused, Unreachable) as error:
            log.debug("limits of %d cells are set later: %s", len(changes), error)

    def _changes_of(self, pool: _Pool) -> dict[ServerKey, Steered]:
        if not any(cell.is_new for cell in pool.cells.values()):
            return {}
        # In one order at every ingress: by name of the start of the cell.
        known = sorted((key, cell) for key, cell in pool.cells.items() if cell.load is not None)
        running = self._haproxy.running
        counted = {(one.backend, one.name): one.in_flight for one in running.servers} if running else {}
        seen = {key: _seen(cell, load, counted.get(key)) for key, cell in known if (load := cell.load) is not None}
        for cell in pool.cells.values():
            cell.is_new = False
        pool.pause_s = _pause_s(seen)
        place = self._ingresses.index(self._ingress)
        now, before = steer(seen, self._haproxy.steered, ingresses=len(self._ingresses), place=place), {}
        for key in now:
            before[key] = self._haproxy.steered.get(key)
            self._haproxy.steered[key] = now[key]
        return {key: one for key, one in now.items() if _differ(before[key], one)}

    async def _poll(self, pool: _Pool, cell: _Cell) -> None:
        server = cell.server
        address = CellAddress(server.address, server.port, server.tls_name)
        names = (f"{INGRESS}: {self._ingress}",)
        client = HttpClient(self._context if address.tls_name else None, address.tls_name, names)
        try:
            while True:
                is_known = await self._read(client, address.url(HEALTH_PATH), cell)
                least_s = sum(len(each.cells) for each in self._pools.values()) / MAX_REPORTS_PER_S
                await asyncio.sleep(max(pool.pause_s if is_known else RETRY_S, least_s))
        finally:
            client.close()

    async def _read(self, client: HttpClient, url: str, cell: _Cell) -> bool:
        try:
            answer = await client.request("GET", url, timeout_s=ANSWER_LIMIT_S)
            load = decode_load(answer.body) if answer.status == 200 else None
        except (NoResponse, BadLoad) as error:
            log.debug("%s: its load is unknown: %s", cell.server.name, error)
            return False
        if load is None or load.server != cell.server.name:
            return False
        cell.load, cell.is_new = load, True
        cell.turn += 1
        self.reports_total += 1
        self._news.set()
        return True


def _shared_cells(desired: DesiredHaproxy, ingress: str) -> dict[ServerKey, Server]:
    if len(desired.ingresses) < 2 or ingress not in desired.ingresses:
        return {}
    return {(server.backend, server.name): server for server in desired.servers if server.cell and not server.drain}


def _seen(cell: _Cell, load: CellLoad, counted: int | None) -> SeenCell:
    return SeenCell(
        places=cell.server.max_connections,
        weight=cell.server.weight,
        own=load.own,
        in_flight=load.in_flight,
        waiting=load.waiting,
        running=load.running,
        kv_percent=load.kv_percent,
        turn=cell.turn,
        counted=counted,
    )


def _pause_s(seen: dict[ServerKey, SeenCell]) -> float:
    if any(cell.in_flight >= BUSY_SHARE * cell.places for cell in seen.values()):
        return BUSY_EVERY_S
    return CALM_EVERY_S if any(cell.in_flight for cell in seen.values()) else IDLE_EVERY_S


def _differ(before: Steered | None, now: Steered) -> bool:
    return before is None or (before.limit, before.weight) != (now.limit, now.weight)
