"""A prefill cell and a decode cell of the simulator with their real proxies, connected over TLS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.load_messages import HandoverLoad
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.proxy_messages import Pairs
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.engines.sim.cells import MODEL, Cell, Member
from tests.ports import free_port

LAYOUT = "a94f01c2"
PREFILL_NODE, DECODE_NODE = "n-0000000p", "n-0000000d"
COMPLETIONS = "/v1/completions"
FROM_TOKENS = 64


@dataclass
class Half:
    """One cell: its engine and its proxy."""

    engine: Member
    proxy: ProxyProcess

    async def handovers(self) -> HandoverLoad:
        return msgspec.convert((await self.proxy.status())["load"]["handovers"], HandoverLoad)

    async def metric(self, name: str) -> float:
        return await asyncio.to_thread(self.engine.metric, name)


@dataclass
class Pair:
    """Both cells, and the ingress that sends requests."""

    fleet: FleetOfTests
    folder: Path
    prefill: Half
    decode: Half
    prefill_cell: PrefillCell
    identities: dict[str, Identity] = field(default_factory=dict)

    async def connect(
        self, kind: IdentityKind, subject: str, half: Half, node: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the proxy of a cell, with a certificate of this name."""
        identity = self.identities.get(subject) or self.fleet.certify(self.folder / subject, kind, subject)
        self.identities[subject] = identity
        name = self.fleet.name(IdentityKind.NODE, node).dns
        context = identity.client_context()
        return await asyncio.open_connection("127.0.0.1", half.proxy.port, ssl=context, server_hostname=name)

    async def send(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Message:
        """A client's request, through its ingress, to the decode cell."""
        reader, writer = await self.connect(IdentityKind.INGRESS, "i-1", self.decode, DECODE_NODE)
        try:
            writer.write(request(path, msgspec.json.encode({"model": MODEL, **body}), **headers))
            return await read_message(reader)
        finally:
            writer.transport.abort()

    async def pair(self, **changes: Any) -> None:
        """Pairs the proxies, as their agents do."""
        cell = msgspec.structs.replace(self.prefill_cell, **changes)
        decode = Pairs("d-1", prefill_cells=(cell,), prefill_from_tokens=FROM_TOKENS)
        for half, pairs in ((self.decode, decode), (self.prefill, Pairs("p-1", decode_nodes=(DECODE_NODE,)))):
            reported = await half.proxy.admin("/pairs", msgspec.json.encode(pairs))
            assert (reported.status, reported.json()["pairs"]) == (200, pairs.name)


@asynccontextmanager
async def running_pair(
    folder: Path, *, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = (), proxy_options: tuple[str, ...] = ()
) -> AsyncIterator[Pair]:
    """Both cells, paired. `prefill` and `decode` are further options of the engines, `proxy_options` of the proxies."""
    fleet, kv_port = FleetOfTests(), free_port()
    for name in "pd":
        (folder / name).mkdir()
    engines = {"p": Cell(folder / "p", followers=0), "d": Cell(folder / "d", followers=0)}
    where = ("--kv-endpoint", f"127.0.0.1:{kv_port}")
    members = {
        "p": engines["p"].start(0, "--cell-role", "prefill", *where, *prefill),
        "d": engines["d"].start(0, "--cell-role", "decode", *decode),
    }
    async with AsyncExitStack() as stack:
        for each in engines.values():
            stack.callback(each.stop)
        halves, identities = {}, {}
        for name, node, role in (("p", PREFILL_NODE, "prefill"), ("d", DECODE_NODE, "decode")):
            identities[node] = fleet.certify(folder / node, IdentityKind.NODE, node)
            engine = Engine()
            engine.port = int(members[name].url.rpartition(":")[2])
            options = ("--cell", f"c-{name}", "--node-id", node, "--cell-role", role, "--kv-layout", LAYOUT)
            more = ("--model", MODEL, "--priorities", "--identity", str(folder / node), *proxy_options)
            proxy = await stack.enter_async_context(running_proxy(engine, *options, *more, wait=False))
            halves[name] = Half(members[name], proxy)
        for half in halves.values():
            await until(half.proxy.is_healthy, "both cells are healthy")
        port = halves["p"].proxy.port
        cell = PrefillCell("c-p", 3, PREFILL_NODE, "127.0.0.1", port, kv_port, LAYOUT, 4)
        pair = Pair(fleet, folder, halves["p"], halves["d"], cell, identities)
        await pair.pair()
        yield pair
