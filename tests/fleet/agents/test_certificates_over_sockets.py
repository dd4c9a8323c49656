"""Certificates over agents' sockets: only for the agent's own name, with new credentials, and with changed authorities
as soon as they change."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connections

from engine_agent.node.identity import Identity
from engine_agent.protocol.codec import encode
from engine_agent.protocol.messages import Certificate, CertificateRequest, Credential, Trust
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.certificates import REQUESTS_BURST
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHub
from fleet.agents.consumers.socket import AgentSocket
from fleet.agents.models import IssuedCertificate
from fleet.agents.selectors import trust_now
from fleet.agents.services.authority import agent_trust_end, authority_ensure
from fleet.agents.services.enrolment import CREDENTIAL_RENEWED_AFTER
from fleet.nodes.models import AgentCredential
from kernel import clock
from tests.fleet.agents.agent_client import AgentClient, client_with, connected, eventually, hello

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]

M = TypeVar("M")


@pytest_asyncio.fixture
async def socket() -> AsyncIterator[AgentSocket]:
    hub = AgentHub({AgentKind.NODE: NodeHandler()})
    yield AgentSocket(hub)
    await hub.stop()
    await sync_to_async(connections.close_all)()


async def next_of(client: AgentClient, kind: type[M]) -> M:
    while not isinstance(message := await client.receive_message(), kind):
        pass
    return message


async def request(client: AgentClient, identity: Identity) -> None:
    await client.send_message(encode(CertificateRequest(identity.signing_request(), identity.bundle_digest())))


async def test_an_agent_gets_a_certificate_for_its_own_name(socket: AgentSocket, tmp_path: Path) -> None:
    identity = Identity(tmp_path)
    async with connected(socket) as client:
        await request(client, identity)
        answer = await next_of(client, Certificate)
        validity = identity.store(chain=answer.chain, bundle=answer.trust.bundle, revoked=answer.trust.revoked)
        assert str(validity.name) == "node n-a"


async def test_whoever_requests_without_end_gets_no_more_than_its_budget(socket: AgentSocket, tmp_path: Path) -> None:
    async with connected(socket) as client:
        for _ in range(12):
            await request(client, Identity(tmp_path))
        for _ in range(int(REQUESTS_BURST)):
            await next_of(client, Certificate)
        assert await sync_to_async(IssuedCertificate.objects.count)() == REQUESTS_BURST


async def test_a_request_that_is_none_costs_the_agent_nothing_else(socket: AgentSocket, tmp_path: Path) -> None:
    async with connected(socket) as client:
        await client.send_message(encode(CertificateRequest("no request")))
        await request(client, Identity(tmp_path))
        assert (await next_of(client, Certificate)).chain


async def test_a_credential_is_renewed_with_a_certificate_and_the_old_one_counts_until_the_new_one_is_shown(
    socket: AgentSocket, tmp_path: Path
) -> None:
    async with connected(socket) as client:
        aged = clock.now() - CREDENTIAL_RENEWED_AFTER - timedelta(minutes=1)
        await AgentCredential.objects.aupdate(created_at=aged)
        await request(client, Identity(tmp_path))
        renewed = (await next_of(client, Credential)).credential
        old, new = [row async for row in AgentCredential.objects.order_by("pk")]
        assert (old.revoked_at, new.subject) == (None, "n-a")
    second = client_with(socket, renewed)
    assert await second.connect() == {"type": "websocket.accept"}
    await second.send_message(encode(hello()))
    assert await eventually(AgentCredential.objects.filter(pk=old.pk, revoked_at__isnull=False).first)
    await second.disconnect()


async def test_all_agents_hear_of_a_revocation_at_once(socket: AgentSocket, tmp_path: Path) -> None:
    trust = await sync_to_async(authority_ensure)(clock.now())
    async with connected(socket, "n-a") as client, connected(socket, "n-b") as other:
        assert (await next_of(client, Trust)).bundle == trust.bundle
        await next_of(other, Trust)
        await request(client, Identity(tmp_path))
        await next_of(client, Certificate)
        await sync_to_async(agent_trust_end)(kind="node", subject="n-a", now=clock.now())
        now = await sync_to_async(trust_now)()
        assert now is not None
        assert (await next_of(other, Trust)).revoked == now.revoked != trust.revoked
