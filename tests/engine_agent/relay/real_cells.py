"""Real cell proxies in front of real engines, and an ingress with a relay in front of both: the path of a stream in a
fleet."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.ingress.relay_processes import read_counts
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool
from engine_agent.protocol.load_messages import HandoverLoad, UsageRow
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.proxy_messages import Pairs
from engine_agent.protocol.states import CellRole
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.ingress.ingresses import RunningIngress
from tests.engine_agent.ingress.test_relays import has_relay
from tests.engine_agent.tls import fleet_of_rigs

CHAT = "/v1/chat/completions"
PLACES, FROM_TOKENS = 16, 32
LAYOUTS = {CellRole.MIXED: "", CellRole.PREFILL: "a94f01c2", CellRole.DECODE: "a94f01c2"}


@dataclass(frozen=True)
class CellEngine:
    """The engine of a cell. `kv_port`: where other engines fetch prompts that it has read."""

    url: str
    role: CellRole = CellRole.MIXED
    kv_port: int = 0


@dataclass
class RealCells:
    """`relay`: the socket of the relay."""

    ingress: RunningIngress
    relay: Path
    proxies: dict[str, ProxyProcess]

    async def route(self, *cells: str) -> None:
        endpoints = (
            CellEndpoint(cell, 1, "127.0.0.1", self.proxies[cell].port, PLACES, node=node_of(cell), version="1")
            for cell in cells
        )
        await self.ingress.route(Pool("demo", ("demo",), "realtime", tuple(endpoints), (), {}, continues=True))

    async def stream(
        self, body: Mapping[str, Any], after: int, act: Callable[[str], Awaitable[None]]
    ) -> list[dict[str, Any]]:
        """Reads a chat to its end. `act` is called once with the name of its cell, after so many events."""
        events: list[dict[str, Any]] = []
        acting: asyncio.Future[None] | None = None
        request = self.ingress.http.build_request("POST", CHAT, json={"model": "demo", "stream": True, **body})
        answer = await self.ingress.http.send(request, stream=True)
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            assert not line.startswith((":", 'data: {"error"')), line
            events += [json.loads(line[6:])] if line.startswith("data: {") else []
            if acting is None and len(events) == after:
                acting = asyncio.ensure_future(act(answer.headers["x-switchyard-cell"]))
        assert acting is not None, "the stream was too short"
        await acting
        assert events[-1]["choices"] == [], "the last event has the usage"
        return events

    async def continued(self) -> Counter[str]:
        """Streams that continued, by reason."""
        return Counter((await read_counts(self.relay)).pools["demo"].continued_total)

    async def handovers(self, cell: str) -> HandoverLoad:
        return msgspec.convert((await self.proxies[cell].status())["load"]["handovers"], HandoverLoad)

    async def counted(self) -> tuple[int, int]:
        """Tokens that the cells counted for clients, without those of proxies that do not run."""
        rows: list[UsageRow] = []
        for proxy in self.proxies.values():
            with suppress(OSError):
                rows += msgspec.convert((await proxy.status())["load"]["usage"], tuple[UsageRow, ...])
        return sum(row.prompt_tokens_total for row in rows), sum(row.completion_tokens_total for row in rows)

    async def counts(self, used: Mapping[str, int]) -> None:
        """Waits until the cells counted what a client was told."""

        async def are_equal() -> bool:
            return await self.counted() == (used["prompt_tokens"], used["completion_tokens"])

        await until(are_equal, f"the cells counted {used}")


def node_of(cell: str) -> str:
    return f"n-0000000{cell[-1]}"


def text_of(events: Iterable[Mapping[str, Any]]) -> str:
    choices = (choice for event in events for choice in event["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def behind_an_ingress(
    folder: Path, engines: Mapping[str, CellEngine], model: str, *options: str
) -> AsyncIterator[RealCells]:
    """Each cell name ends with another letter. All but prefill cells are routed. `options` of all proxies."""
    async with AsyncExitStack() as stack:
        proxies = {}
        for cell, engine in engines.items():
            fleet_of_rigs().certify(folder / cell, IdentityKind.NODE, node_of(cell))
            named = ("--cell", cell, "--node-id", node_of(cell), "--generation", "1", "--model", model)
            roles = ("--cell-role", engine.role.value, "--kv-layout", LAYOUTS[engine.role])
            more = (*named, *roles, "--identity", str(folder / cell), "--priorities", "--replays", *options)
            proxies[cell] = await stack.enter_async_context(
                running_proxy(_at(engine.url), *more, max_concurrency=PLACES, wait=False)
            )
        for proxy in proxies.values():
            await until(proxy.is_healthy, "each cell is healthy")
        await _pair(engines, proxies)
        ingress = await stack.enter_async_context(RunningIngress(folder / "ingress").running())
        answering = [cell for cell, engine in engines.items() if engine.role is not CellRole.PREFILL]
        cells = RealCells(ingress, ingress.settings.state_dir, proxies)
        await cells.route(*answering)
        await ingress.sees(**dict.fromkeys(answering, "up"))
        cells.relay = await has_relay(ingress)
        yield cells


async def _pair(engines: Mapping[str, CellEngine], proxies: Mapping[str, ProxyProcess]) -> None:
    """Every decode cell has its prompts read by every prefill cell."""
    reading = [cell for cell, engine in engines.items() if engine.role is CellRole.PREFILL]
    decoding = [cell for cell, engine in engines.items() if engine.role is CellRole.DECODE]
    places = tuple(
        PrefillCell(
            *(cell, 1, node_of(cell), "127.0.0.1", proxies[cell].port, engines[cell].kv_port),
            *(LAYOUTS[CellRole.PREFILL], PLACES),
        )
        for cell in reading
    )
    pairs = dict.fromkeys(reading, Pairs("p", decode_nodes=tuple(map(node_of, decoding))))
    pairs |= dict.fromkeys(decoding, Pairs("d", prefill_cells=places, prefill_from_tokens=FROM_TOKENS))
    for cell, given in pairs.items():
        assert (await proxies[cell].admin("/pairs", msgspec.json.encode(given))).status == 200


def _at(url: str) -> Engine:
    """As what proxies of tests are started in front of."""
    engine = Engine()
    engine.port = int(url.rpartition(":")[2])
    return engine
