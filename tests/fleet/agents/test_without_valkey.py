"""Without Valkey, orders still reach agents and reports still arrive, but later."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connections

from engine_agent.protocol.codec import encode
from engine_agent.protocol.messages import Observed, Report
from engine_agent.protocol.states import AgentKind, EngineState
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHub
from fleet.agents.consumers.socket import AgentSocket
from fleet.cells.services import cell_start
from fleet.reconcile.planning.decisions import StartCell
from fleet.reconcile.planning.states import CellState
from kernel import clock
from tests.fleet import rows
from tests.fleet.agents.agent_client import connected, eventually, report_of
from tests.kernel.servers_away import KINDS, point_valkey_at, server_away

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]


@pytest_asyncio.fixture(params=KINDS)
async def socket(
    request: pytest.FixtureRequest, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AgentSocket]:
    with server_away(request.param) as url:
        point_valkey_at(url, settings, monkeypatch)
        hub = AgentHub({AgentKind.NODE: NodeHandler()})
        yield AgentSocket(hub)
        await hub.stop()
        await sync_to_async(connections.close_all)()


async def test_a_change_reaches_its_node_and_a_report_the_database(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.receive_message()
        await sync_to_async(rows.cell)("c1", state=CellState.PENDING, generation=0)
        decision = StartCell("c1", CellState.PENDING, 0, ("n-a",), "placed")
        await sync_to_async(cell_start)(decision, now=clock.now())
        assert (await client.receive_message()).assignment.cell == "c1"
        ready = Observed(state=EngineState.READY, cell="c1", generation=1, rank=0)
        await client.send_message(encode(Report(seq=1, observed=ready)))
        assert await eventually(report_of("n-a", state="ready"))
