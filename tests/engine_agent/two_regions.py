"""Two regions of real parts in one test: an ingress in each, cells of the simulator behind their proxies, and spilling
to the other region."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.proxy_process import running_proxy
from tests.engine_agent.engines.sim.cells import MODEL, Cell
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.ingresses import AWAY, RunningIngress, pool
from tests.engine_agent.tls import fleet_of_rigs

MAX_CONCURRENCY = 8


@contextlib.asynccontextmanager
async def running_cell(folder: Path, number: int) -> AsyncIterator[CellEndpoint]:
    """One cell of one node: engine, proxy, and how an ingress reaches it."""
    node, name = f"n-2e9{number:05x}", f"c-{number}"
    fleet_of_rigs().certify(folder / "node", IdentityKind.NODE, node)
    engines = Cell(folder, followers=0)
    engine = Engine()
    engine.port = int((await asyncio.to_thread(engines.start, 0)).url.rpartition(":")[2])
    options = ("--cell", name, "--node-id", node, "--model", MODEL, "--identity", str(folder / "node"))
    try:
        async with running_proxy(engine, *options, max_concurrency=MAX_CONCURRENCY) as proxy:
            yield CellEndpoint(name, 3, "127.0.0.1", proxy.port, MAX_CONCURRENCY, node=node)
    finally:
        await asyncio.to_thread(engines.stop)


@contextlib.asynccontextmanager
async def two_regions(
    folder: Path, here: int = 2, there: int = 1
) -> AsyncIterator[tuple[RunningIngress, RunningIngress]]:
    """`here` and `there`: the number of cells of each region. Both ingresses see their own cells and the other
    region."""
    async with contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(RunningIngress(folder / "home").running())
        away = await stack.enter_async_context(RunningIngress(folder / "away", AWAY).running())
        cells = [
            await stack.enter_async_context(running_cell(folder / f"c{number}", number))
            for number in range(1, here + there + 1)
        ]
        for ingress, own, other in ((home, cells[:here], away), (away, cells[here:], home)):
            named = pool(name=MODEL, models=(MODEL,), spill=[other])
            await ingress.route(msgspec.structs.replace(named, cells=tuple(own)))
        for ingress, own in ((home, cells[:here]), (away, cells[here:])):
            await ingress.sees(**{cell.cell: "up" for cell in own})
            await eventually(lambda ingress=ingress: other_region_is_usable(ingress))  # type: ignore[misc]
        yield home, away


def other_region_is_usable(ingress: RunningIngress) -> bool:
    running = ingress.ingress.serving.running
    spills = [server for server in running.servers if server.backend.startswith("spill.")] if running else []
    return bool(spills) and all(server.usable for server in spills)
