"""Two cells of one node each with real processes, whose agents send their proxies the pairs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from engine_agent.cell_proxy.health import ProxyStatus
from engine_agent.protocol.load_messages import HandoverLoad
from engine_agent.protocol.messages import Assignment, Desired, EnginePlan, Peer, PrefillCell
from engine_agent.protocol.ports import KV_TRANSFER, PORTS_PER_NODE, PROXY, PROXY_ADMIN
from engine_agent.protocol.states import CellRole, MemberRole, Phase
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.node.agents import MODEL, Node
from tests.ports import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
LAYOUT = "a94f01c2"


class Pair:
    """A prefill node and a decode node under the orders of a test."""

    def __init__(self, plane: FakeControlPlane, folder: Path) -> None:
        first = free_ports(2 * PORTS_PER_NODE)
        self.plane = plane
        self.prefill, self.decode = (Node(plane, folder, first + n * PORTS_PER_NODE) for n in range(2))
        self.version = 0

    async def order(self, *, paired: bool) -> None:
        """Orders both nodes, with each other as pairs."""
        self.version += 1
        base = self.prefill.port_base
        place = ("p-1", 1, self.prefill.id, "127.0.0.1", base + PROXY, base + KV_TRANSFER, LAYOUT, 8)
        prefill = msgspec.structs.replace(
            _assignment(self.prefill, "p-1", CellRole.PREFILL), decode_nodes=(self.decode.id,) if paired else ()
        )
        decode = msgspec.structs.replace(
            _assignment(self.decode, "d-1", CellRole.DECODE),
            prefill_cells=(PrefillCell(*place),) if paired else (),
            prefill_from_tokens=64,
        )
        for node, assignment in ((self.prefill, prefill), (self.decode, decode)):
            await self.plane.order(Desired(node.id, self.version, assignment))

    async def ask(self) -> None:
        body = {"model": MODEL, "prompt": "one of many words in a long prompt " * 30, "max_tokens": 4}
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{self.decode.port_base + PROXY}/v1/completions"
            assert (await client.post(url, json=body)).status_code == 200

    async def status(self, node: Node) -> ProxyStatus:
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{node.port_base + PROXY_ADMIN}/status")
        return msgspec.json.decode(answer.content, type=ProxyStatus)

    async def has_pairs(self, node: Node, *, other_than: str = "") -> str:
        """The name of the pairs of a node's proxy, once it has others and serves."""
        async with asyncio.timeout(60):
            while True:
                with suppress(httpx.TransportError):  # it starts
                    status = await self.status(node)
                    if status.pairs != other_than and status.health.ok:
                        return status.pairs
                await asyncio.sleep(0.05)

    async def handed_over(self) -> int:
        return ((await self.status(self.decode)).load.handovers or HandoverLoad()).handovers_total


def _assignment(node: Node, cell: str, role: CellRole) -> Assignment:
    return Assignment(
        cell=cell,
        generation=1,
        rank=0,
        role=MemberRole.LEADER,
        phase=Phase.SERVE,
        plan=EnginePlan("sim", MODEL, max_concurrency=8, ready_timeout_s=60.0, args=("--load-time-s", "0.1")),
        peers=(Peer(node.id, 0, "127.0.0.1", node.port_base),),
        secret=f"secret of {cell}",
        cell_role=role,
        kv_layout=LAYOUT,
    )


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    plane = FakeControlPlane()
    async with plane.running():
        pair = Pair(plane, tmp_path)
        nodes = (pair.prefill, pair.decode)
        try:
            for node in nodes:
                node.start_agent()
            await pair.order(paired=True)
            for node in nodes:
                await node.says("ready", 1)
            yield pair
        finally:
            statuses = await asyncio.gather(*(asyncio.to_thread(node.stop) for node in nodes))
            assert statuses == [0, 0], "\n".join(node.log() for node in nodes)


async def test_proxies_are_told_of_each_other_and_told_again_and_engines_run_on(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        assert await pair.has_pairs(node)
    await pair.ask()
    assert await pair.handed_over() == 1
    assert await eventually(lambda: next((it for it in pair.decode.reports if it.load and it.load.handovers), None)), (
        "its load says what was handed over"
    )
    engines = [node.observed.engine_pid for node in (pair.prefill, pair.decode)]
    (proxy,) = (found.pid for found in pair.decode.left() if found.pid != engines[1])
    os.kill(proxy, 9)
    paired = await pair.has_pairs(pair.decode)
    await pair.order(paired=False)
    await pair.has_pairs(pair.decode, other_than=paired)
    await pair.ask()
    assert await pair.handed_over() == 0
    assert [node.observed.engine_pid for node in (pair.prefill, pair.decode)] == engines
