"""WebSocket handler of ingress agents, over PostgreSQL and Valkey."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connections

from engine_agent.protocol.codec import encode
from engine_agent.protocol.ingress_messages import (
    ApplicationTls,
    IngressObserved,
    IngressReport,
    RoutingTable,
    ServerCertificate,
)
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.request_messages import RequestSample, RequestWindow, SampleKind
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.hub import AgentHub
from fleet.agents.consumers.socket import AgentSocket
from fleet.agents.services.enrolment import agent_enrol, join_token_issue
from fleet.cells.models import Cell
from fleet.regions.models import Region
from fleet.regions.services import application_certificate_set
from fleet.requests.models import RequestSample as Sample
from kernel import clock
from tests.fleet import rows
from tests.fleet.agents.agent_client import AgentClient, client_with, eventually
from tests.server_certificates import PublicAuthority, Signed
from traffic.keys.services import key_create
from traffic.routing import models
from traffic.routing.consumers import IngressHandler
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]

AUTHORITY = PublicAuthority()


@pytest_asyncio.fixture
async def socket() -> AsyncIterator[AgentSocket]:
    hub = AgentHub({AgentKind.INGRESS: IngressHandler()})
    yield AgentSocket(hub)
    await hub.stop()
    await sync_to_async(connections.close_all)()


@sync_to_async
def credential(region: str) -> str:
    ingress_create(region=rows.region(region), address="127.0.0.1", port=8080, now=clock.now())
    soon = clock.now() + timedelta(minutes=1)
    token = join_token_issue(kind=AgentKind.INGRESS, subject=f"i-{region}", region=region, expires_at=soon)
    return agent_enrol(token=token, kind="ingress", subject=f"i-{region}", nonce="5e" * 32, now=clock.now())


@asynccontextmanager
async def connected(app: AgentSocket, region: str = "us-east-1") -> AsyncIterator[AgentClient]:
    client = client_with(app, await credential(region))
    assert await client.connect() == {"type": "websocket.accept"}
    kind = AgentKind.INGRESS
    await client.send_message(
        encode(Hello(protocol=PROTOCOL_VERSION, kind=kind, id=f"i-{region}", boot_id="b", agent_version="1"))
    )
    yield client
    await client.disconnect()


async def next_of(client: AgentClient, kind: type[Any]) -> Any:
    while not isinstance(message := await client.receive_message(), kind):
        pass
    return message


async def table_for(client: AgentClient) -> Any:
    return await next_of(client, RoutingTable)


def report(**observed: Any) -> bytes:
    return encode(IngressReport(seq=1, observed=IngressObserved(**observed)))


def stored(**columns: Any) -> Any:
    return lambda: models.IngressReport.objects.filter(ingress="i-us-east-1", **columns).first()


@sync_to_async
def publish() -> None:
    tables_publish(now=clock.now())


async def test_an_ingress_is_told_its_regions_table_on_connecting_and_every_newer_one(socket: AgentSocket) -> None:
    await sync_to_async(lambda: rows.cell("c1", rows.node("n-a")))()
    await publish()
    async with connected(socket) as client:
        table = await table_for(client)
        assert isinstance(table, RoutingTable)
        assert (table.region, table.revision, [cell.cell for cell in table.pools[0].cells]) == ("us-east-1", 1, ["c1"])
        await sync_to_async(Cell.objects.update)(state="failed")
        await publish()
        table = await table_for(client)
        assert (table.revision, table.pools[0].cells) == (2, ())


async def test_an_ingress_of_a_region_without_a_table_waits_for_the_first(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await sync_to_async(rows.deployment)()
        await publish()
        assert (await table_for(client)).revision == 1


async def test_each_is_told_of_its_own_region(socket: AgentSocket) -> None:
    await sync_to_async(rows.deployment)()
    async with connected(socket, "us-east-1") as east, connected(socket, "us-west-2") as west:
        await publish()
        assert ((await table_for(east)).region, (await table_for(west)).region) == (
            "us-east-1",
            "us-west-2",
        )


async def test_what_it_reports_is_kept_as_its_acknowledgement(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.send_message(report(revision=3, haproxy_pid=7, cells={"c1": "up"}))
        kept = await eventually(stored(revision=3, connected=True))
        assert (kept.haproxy_pid, kept.cells) == (7, {"c1": "up"})
        await client.send_message(report(revision=3, haproxy_pid=7, cells={"c1": "down"}))
        await eventually(stored(cells={"c1": "down"}))
    assert (await eventually(stored(connected=False))).revision == 3


async def test_samples_of_requests_are_stored_with_the_tenant_of_their_key(socket: AgentSocket) -> None:
    key = await sync_to_async(lambda: key_create(name="k", tenant="acme", actor="ann", now=clock.now()))()
    prefix, at = key.key.prefix, clock.now().timestamp()
    samples = [
        RequestSample(name, at, SampleKind.ERROR, 429, 1.0, tenant="other", key=text)
        for name, text in (("r-1", prefix), ("r-2", "ffffffff"))
    ]

    def stored_sample(name: str) -> Any:
        return lambda: Sample.objects.filter(request=name, ingress="i-us-east-1").first()

    async with connected(socket) as client:
        await client.send_message(encode(RequestWindow("", 0, at, 0, 2, tuple(samples))))
        first = await eventually(stored_sample("r-1"))
        second = await eventually(stored_sample("r-2"))
    assert (first.tenant, first.key, first.region, first.kind) == ("acme", prefix, "us-east-1", "error")
    assert (second.tenant, second.key, second.kind) == ("", "", "refused")


async def test_what_only_a_node_may_say_is_passed_over(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.send_message(b'{"type": "fault", "signature": "x", "summary": "", "evidence": {}}')
        await client.send_message(report(revision=4))
        assert await eventually(stored(revision=4))


@sync_to_async
def put(server: Signed, region: str = "") -> None:
    application_certificate_set(
        name="api",
        certificate=AUTHORITY.chain(server),
        private_key=server.key_pem,
        region=region,
        actor="ada",
        now=clock.now(),
    )


async def test_it_is_told_of_certificates_with_their_keys_on_connecting_and_of_every_change(
    socket: AgentSocket,
) -> None:
    first, second = AUTHORITY.server("a.test"), AUTHORITY.server("a.test")
    async with connected(socket) as client:
        assert (await next_of(client, ApplicationTls)).certificates == ()
        for server in (first, second):
            await put(server, "us-east-1")
            (told,) = (await next_of(client, ApplicationTls)).certificates
            assert (told.name, told.pem) == ("api", AUTHORITY.chain(server) + server.key_pem)
        await sync_to_async(Region.objects.update)(plain_http="refuse")
        assert (await next_of(client, ApplicationTls)).plain_http == "refuse"


async def test_a_key_that_cannot_be_opened_is_left_to_the_ingress_and_plain_http_is_said_all_the_same(
    socket: AgentSocket, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = AUTHORITY.server("a.test")
    await put(server)
    await sync_to_async(rows.deployment)()
    await publish()
    await sync_to_async(Region.objects.update)(plain_http="refuse")
    settings.SECRET_KEY = "another-secret-key-of-fifty-letters-0123456789-abcdef"
    async with connected(socket) as client:
        told = await client.receive_message()
        assert isinstance(told, ApplicationTls), "TLS settings precede the table"
        assert (told.certificates, told.plain_http) == ((ServerCertificate("api", ""),), "refuse")
        assert isinstance(await client.receive_message(), RoutingTable)
        assert "keeps its copies of api, because the stored keys were encrypted with another" in caplog.text
        await put(server)
        (sealed_anew,) = (await next_of(client, ApplicationTls)).certificates
        assert sealed_anew.pem.endswith(server.key_pem), "uploading it again encrypts its key with the new secret"


async def test_a_key_that_the_secret_before_sealed_is_opened(socket: AgentSocket, settings: Any) -> None:
    server = AUTHORITY.server("a.test")
    await put(server)
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another-secret-key-of-fifty-letters-0123456789-abcdef"
    async with connected(socket) as client:
        assert (await next_of(client, ApplicationTls)).certificates[0].pem.endswith(server.key_pem)
