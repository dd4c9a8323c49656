"""From a revocation to the refusal, with real web, agent and HAProxy, and more keys than fit into one frame."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from engine_agent.ingress.agent import IngressAgent
from engine_agent.ingress.haproxy import find_binary
from engine_agent.ingress.settings import IngressSettings
from engine_agent.node.connection import AgentConnection
from engine_agent.node.enrolment import Enrolment
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import join_token_issue
from kernel import clock
from tests.controlplane.dashboard.web import web_process
from tests.fleet import rows
from tests.ports import free_ingress_port
from traffic.keys.models import ApplicationKey
from traffic.keys.services import NewKey, key_create, key_revoke
from traffic.routing.services.ingresses import ingress_create
from traffic.tasks import publish

pytestmark = pytest.mark.processes

KEYS = 2_000
DEADLINE_S = 60.0
BODY = {"model": "sim-70b", "messages": []}
ID = "i-us-east-1"


def prepared(port: int) -> str:
    """Creates a region with an ingress and many keys; returns the ingress's join token."""
    rows.deployment()
    now = clock.now()
    ingress_create(region=rows.region(), address="127.0.0.1", port=port, now=now)
    ApplicationKey.objects.bulk_create(
        ApplicationKey(
            prefix=f"{number:08x}", digest=f"{number:064x}", name="bulk", tenant="bulk", created_by="a", created_at=now
        )
        for number in range(KEYS)
    )
    soon = now + timedelta(minutes=5)
    return join_token_issue(kind=AgentKind.INGRESS, subject=ID, region="us-east-1", expires_at=soon)


@contextlib.asynccontextmanager
async def running_agent(url: str, home: Path, port: int, token: str) -> AsyncIterator[None]:
    ingress = IngressAgent(IngressSettings(ID, "us-east-1", home, port=port, max_connections=100), find_binary())
    hello = Hello(protocol=PROTOCOL_VERSION, kind=AgentKind.INGRESS, id=ID, boot_id="b", agent_version="0")
    enrolment = Enrolment(url, AgentKind.INGRESS, ID, home, token)
    connection = AgentConnection(enrolment=enrolment, hello=lambda: hello, on_message=ingress.receive)
    serving = ingress.run(connection.send, connection.send_requests)
    tasks = [asyncio.create_task(work) for work in (serving, connection.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(haproxy.process.kill() for haproxy in (ingress.serving, *ingress.body_parsers)))


async def answered(client: httpx.AsyncClient, new: NewKey, status: int) -> None:
    """Repeats the request until it gets this status, and runs the worker's periodic tasks meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await sync_to_async(publish)()
            with contextlib.suppress(httpx.TransportError):
                headers = {"Authorization": f"Bearer {new.text}"}
                if (await client.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == status:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
@pytest.mark.asyncio
async def test_a_revoked_key_is_refused_by_the_ingress_and_the_lag_is_known(tmp_path: Path) -> None:
    port, home = free_ingress_port(), tmp_path / "home"
    home.mkdir()
    token = await sync_to_async(prepared)(port)
    new = await sync_to_async(key_create)(name="search", tenant="rufus", actor="ann", now=clock.now())
    with web_process(tmp_path / "web.log") as url:
        async with (
            running_agent(url, home, port, token),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
        ):
            await answered(client, new, 503)  # the key is valid, but no cell can serve it
            await sync_to_async(key_revoke)(prefix=new.key.prefix, actor="ann", now=clock.now())
            await answered(client, new, 401)
            async with asyncio.timeout(DEADLINE_S):
                while (lag_s := (await sync_to_async(refreshed)(new)).revocation_lag_s) is None:
                    await sync_to_async(publish)()
            assert 0 < lag_s < DEADLINE_S
    await sync_to_async(connections.close_all)()


def refreshed(new: NewKey) -> ApplicationKey:
    return ApplicationKey.objects.get(pk=new.key.pk)
