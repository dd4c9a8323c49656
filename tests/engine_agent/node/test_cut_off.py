"""A node whose control plane never answers runs its last order from the journal, and brings a dead engine back."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.node.journal import Journal
from engine_agent.node.record import JOURNAL_FILE, NodeRecord, ProcessRecord
from engine_agent.protocol.messages import EnginePlan
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from tests.engine_agent.fake_control_plane import FakeControlPlane
from tests.engine_agent.node.agents import Node
from tests.engine_agent.orders import assignment, order
from tests.ports import free_ports

pytestmark = pytest.mark.processes

HASTY_AGENT = """
import sys
from engine_agent.node.planning.node import ConvergeLimits
from engine_agent.node.main import run
sys.exit(run(sys.argv[1:], ConvergeLimits(contact_grace_s=0.2, backoff_first_s=0.1)))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(FakeControlPlane(port=9), tmp_path, free_ports(PORTS_PER_NODE))
    yield node
    assert node.stop() == 0
    assert node.left() == []


def engine_of(node: Node) -> ProcessRecord:
    record = Journal(node.home / JOURNAL_FILE, NodeRecord).load()
    assert record is not None
    assert record.engine is not None
    return record.engine


async def proxy_says(node: Node, ready: bool) -> None:
    url = f"http://127.0.0.1:{node.port_base + PROXY}/healthz"
    async with asyncio.timeout(60):
        while await is_ready(url) is not ready:  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.02)


async def is_ready(url: str) -> bool:
    with closing(HttpClient()) as http:
        try:
            return (await http.request("GET", url, timeout_s=1.0)).status == 200
        except NoResponse:
            return False


@pytest.mark.asyncio
async def test_it_serves_from_the_journal_and_again_after_its_engine_died(node: Node) -> None:
    plan = EnginePlan("sim", "m", max_concurrency=4, ready_timeout_s=30.0, args=("--load-time-s", "0"))
    last_told = order(7, assignment(generation=3, plan=plan), node=node.id)
    Journal(node.home / JOURNAL_FILE, NodeRecord).save(NodeRecord(node.id, last_told))
    node.start_agent(("-c", HASTY_AGENT))
    await proxy_says(node, ready=True)
    first = engine_of(node)
    os.kill(first.pid, signal.SIGKILL)
    await proxy_says(node, ready=False)
    await proxy_says(node, ready=True)
    second = engine_of(node)
    assert (second.cell, second.generation) == ("c-1", 3)
    assert second.pid != first.pid
