"""Web's listener for agents, on a real port with real agents' connections: which certificates are accepted, and their
renewal and revocation without a restart."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from uvicorn.server import ServerState

from controlplane import agent_listener
from controlplane.agent_listener import ControlIdentity, listen
from controlplane.connection_door import ConnectionLimits
from controlplane.websocket_protocol import WebSocketProtocol
from engine_agent.node.connection import DOUBTED_AFTER, ConnectionStatus
from engine_agent.node.enrolment import Enrolment, EnrolmentRefused, EnrolmentUnreachable
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind, control_name, name_of_peer
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.hub import AgentHub, AgentSession
from fleet.agents.consumers.socket import AgentSocket
from fleet.agents.models import IssuedCertificate
from fleet.agents.selectors import trust_now
from fleet.agents.services.authority import CertificateOrder, agent_trust_end, certificate_issue
from fleet.agents.services.enrolment import PEER_CERTIFICATE, credential_issue
from fleet.machines.services.revocation import machine_revoke
from fleet.nodes.api import enrol
from fleet.nodes.models import AgentCredential
from fleet.reconcile.planning.states import MachineState
from kernel import clock
from kernel.models import Event
from tests.controlplane.agent_listener.agents import Agent, answers_whole_requests, listening_for
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import eventually
from tests.fleet import rows
from tests.fleet.agents.agent_client import eventually as stored

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]


async def certificate(
    identity: Identity, subject: str, *, kind: IdentityKind = IdentityKind.NODE, now: datetime | None = None
) -> None:
    order = CertificateOrder(kind, subject, identity.signing_request())
    signed = await sync_to_async(certificate_issue)(order, now=now or clock.now())
    identity.store(chain=signed.chain, bundle=signed.trust.bundle, revoked=signed.trust.revoked)


async def test_an_agent_connects_by_the_authorities_alone_and_gets_its_certificate(agent: Agent) -> None:
    async with agent.running():
        await eventually(agent.identity.validity, what="a certificate")
        validity = agent.identity.validity()
        assert validity is not None
        assert str(validity.name) == "node n-a"


async def test_an_agent_that_believes_other_authorities_trusts_nobody_here(agent: Agent, hub: AgentHub) -> None:
    agent.identity.store_trust(bundle=FleetOfTests().bundle, revoked="")
    async with agent.running():
        await eventually(lambda: "certificate verify failed" in agent.connection.status.reason)
    assert not hub.sessions


async def test_an_agent_without_authorities_says_what_is_missing(agent: Agent) -> None:
    agent.identity.bundle_file.unlink()
    async with agent.running():
        await eventually(lambda: "ca.pem is missing" in agent.connection.status.reason)


async def test_a_certificate_of_another_agent_keeps_a_credential_out_until_it_is_not_shown(
    agent: Agent, hub: AgentHub, caplog: pytest.LogCaptureFixture
) -> None:
    await certificate(agent.identity, "n-b")
    async with agent.running():
        await eventually(lambda: "n-a" in hub.sessions)
    assert "refused a credential of node n-a with the certificate of node n-b" in caplog.text


async def bound() -> bool:
    return await AgentCredential.objects.filter(subject="n-a", bound_at__isnull=False).aexists()


@asynccontextmanager
async def certified(agent: Agent, hub: AgentHub) -> AsyncIterator[AgentSession]:
    """While it runs: its session, opened with its certificate."""
    async with agent.running():
        await eventually(lambda: "n-a" in hub.sessions and hub.sessions["n-a"].is_certified, what="a certificate shown")
        yield hub.sessions["n-a"]


def thief(agent: Agent, tmp_path: Path) -> Agent:
    """It has the agent's credential, and nothing else of it."""
    made = Agent(tmp_path / "thief", agent.port, (tmp_path / "n-a" / "credential").read_text())
    made.identity.store_trust(bundle=agent.identity.bundle_file.read_text(), revoked="")
    return made


async def test_an_agent_shows_its_first_certificate_at_once_and_is_bound_to_it(agent: Agent, hub: AgentHub) -> None:
    assert not await bound()
    async with certified(agent, hub):
        assert await bound()


async def test_a_stolen_credential_alone_gets_nothing_and_the_agent_keeps_its_socket(
    agent: Agent, hub: AgentHub, tmp_path: Path
) -> None:
    async with certified(agent, hub) as session, thief(agent, tmp_path).running() as other:
        await eventually(lambda: "must join again" in other.connection.status.reason)
        assert hub.sessions == {"n-a": session}
        assert not session.is_cut
        assert not other.identity.has_certificate
    event = await Event.objects.aget(kind="agent.refused")
    assert "none was presented" in event.message


async def test_nor_does_it_with_the_certificate_of_another_agent(
    agent: Agent, hub: AgentHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with certified(agent, hub) as session:
        other = thief(agent, tmp_path)
        await certificate(other.identity, "n-b")
        async with other.running():
            await eventually(lambda: "with the certificate of node n-b" in caplog.text)
            await eventually(lambda: "none was presented" in caplog.text)
        assert hub.sessions == {"n-a": session}


@pytest.mark.parametrize("shows", [True, False])
async def test_who_enrols_for_another_is_known_by_the_certificate_that_it_shows(
    agent: Agent, hub: AgentHub, shows: bool
) -> None:
    """As a machine does for the node that it was told to run."""
    await certificate(agent.identity, "n-a")
    shown: list[Any] = []

    async def looks(scope: Any, receive: Any, send: Any) -> None:
        shown.append(scope[PEER_CERTIFICATE])
        await answers_whole_requests(scope, receive, send)

    async with listening_for(hub, looks) as port:
        enrolment = Enrolment(f"https://127.0.0.1:{port}", AgentKind.NODE, "n-b", agent.home / "b", join_token="t")
        Identity(enrolment.home).store_trust(bundle=agent.identity.bundle_file.read_text(), revoked="")
        with suppress(EnrolmentRefused, EnrolmentUnreachable):
            await enrolment.enrol(shown_by=agent.identity if shows else None)
    assert [one and str(name_of_peer(one)) for one in shown] == ["node n-a" if shows else None]


async def test_a_machine_enrols_its_node_over_tls_with_its_certificate_and_not_without(
    hub: AgentHub, tmp_path: Path
) -> None:
    machine = Identity(tmp_path / "machine")
    secret = await sync_to_async(bound_machine)()
    await certificate(machine, "m-00000001", kind=IdentityKind.MACHINE)
    async with listening_for(hub, enrols) as port:
        enrolment = Enrolment(
            f"https://127.0.0.1:{port}", AgentKind.NODE, "n-00000001", tmp_path / "node", join_token=secret
        )
        Identity(enrolment.home).store_trust(bundle=machine.bundle_file.read_text(), revoked="")
        with pytest.raises(EnrolmentRefused, match="none was presented"):
            await enrolment.enrol()
        assert await enrolment.enrol(shown_by=machine) == enrolment.stored_credential()


async def enrols(scope: Any, receive: Any, send: Any) -> None:
    """The view, in the thread of the test's own database connection."""
    answer = await sync_to_async(enrol)(ASGIRequest(scope, BytesIO((await receive())["body"])))
    headers = [(b"content-length", str(len(answer.content)).encode())]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})


def bound_machine() -> str:
    """The credential of a machine that was told to run a node, and has shown its certificate."""
    rows.machine("m-00000001", state=MachineState.TAKEN.value, runs="n-00000001")
    with transaction.atomic():
        secret = credential_issue(kind="machine", subject="m-00000001", region="us-east-1", now=clock.now())
    AgentCredential.objects.update(bound_at=clock.now())
    return secret


async def test_an_agent_that_lost_its_certificate_says_that_it_must_join_anew(agent: Agent, hub: AgentHub) -> None:
    async with certified(agent, hub):
        pass
    agent.identity.combined_file.unlink()
    async with agent.running():
        await eventually(lambda: "must join again" in agent.connection.status.reason)
    assert not hub.sessions


async def test_an_agent_that_was_off_until_its_certificate_had_ended_comes_back_with_it(
    agent: Agent, hub: AgentHub
) -> None:
    await certificate(agent.identity, "n-a", now=clock.now() - timedelta(days=3))
    before = agent.identity.validity()
    assert before is not None
    assert before.not_after < clock.now()
    await AgentCredential.objects.aupdate(bound_at=clock.now())
    async with certified(agent, hub):
        await eventually(lambda: agent.identity.validity() != before, what="another certificate")


async def test_a_web_that_ends_in_the_middle_of_handshakes_makes_no_certificate_count_as_lost(
    agent: Agent, hub: AgentHub
) -> None:
    """It looks to an agent like a refusal in TLS."""
    async with certified(agent, hub):
        pass
    ended = 0

    async def ends_at_first(scope: Any, receive: Any, send: Any) -> None:
        nonlocal ended
        ended += 1
        if ended < DOUBTED_AFTER:
            raise ConnectionAbortedError
        await AgentSocket(hub)(scope, receive, send)

    async with listening_for(hub, ends_at_first) as port:
        again = Agent(agent.home, port, (agent.home / "credential").read_text())
        async with again.running():
            await eventually(lambda: "n-a" in hub.sessions)
            assert hub.sessions["n-a"].is_certified
    assert not await Event.objects.filter(kind="agent.refused").aexists()


async def test_a_revoked_certificate_is_refused_by_the_handshake_without_a_restart(
    agent: Agent, port: int, hub: AgentHub
) -> None:
    await certificate(agent.identity, "n-a")
    await sync_to_async(agent_trust_end)(kind="node", subject="n-a", now=clock.now())
    name = control_name(agent.identity.fleet()).dns
    context = agent.identity.client_context()

    async def is_refused() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            return not await reader.read(1)
        except (ssl.SSLError, ConnectionError):
            return True
        finally:
            writer.close()

    async with asyncio.timeout(60):
        while not await is_refused():
            pass


async def test_without_a_certificate_only_a_credential_that_counts_lets_anybody_in(agent: Agent, hub: AgentHub) -> None:
    async with agent.running():
        await eventually(lambda: "n-a" in hub.sessions)
    await eventually(lambda: "n-a" not in hub.sessions)

    def revoke() -> None:
        machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, runs="n-a")
        machine_revoke(machine_id=machine.id, actor="ada", now=clock.now())

    await sync_to_async(revoke)()
    agent.identity.combined_file.unlink(missing_ok=True)
    kept = agent.identity.folder.parent / "credential"
    for text in (kept.read_text(), f"sw_{14 * '0'}_{48 * '0'}", "sw_never_enrolled"):
        kept.write_text(text)
        async with agent.running():
            await eventually(lambda: "403" in agent.connection.status.reason, what=agent.connection.status.reason)
            assert "n-a" not in hub.sessions
        agent.connection.status = ConnectionStatus(connected=False, reason="not connected yet")


def _refreshed(control: ControlIdentity) -> str:
    control.refresh(clock.now())
    validity = control.identity.validity()
    assert validity is not None
    return validity.serial


async def test_the_control_planes_certificate_is_renewed_when_it_is_due_revoked_or_of_another_database(
    tmp_path: Path,
) -> None:
    refreshed = sync_to_async(_refreshed)
    control = ControlIdentity(tmp_path)
    first = await refreshed(control)
    assert await refreshed(control) == first
    await IssuedCertificate.objects.filter(serial=first).aupdate(revoked_at=clock.now())
    second = await refreshed(control)
    await IssuedCertificate.objects.filter(serial=second).adelete()
    third = await refreshed(control)
    assert len({first, second, third}) == 3
    validity = control.identity.validity()
    assert validity is not None
    later = validity.not_before + timedelta(hours=15)
    await sync_to_async(control.refresh)(later)
    renewed = control.identity.validity()
    assert renewed is not None
    assert renewed.serial != third
    assert await stored(lambda: (trust_now() or FleetOfTests()).bundle) == control.identity.bundle_file.read_text()


async def test_a_damaged_certificate_is_logged_and_keeps_the_listener_closed_no_longer_than_it_is_there(
    hub: AgentHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(AgentSocket(hub), interface="asgi3", ws=WebSocketProtocol, lifespan="off", log_config=None)
    config.load()
    servers: list[asyncio.Server] = []
    identity = ControlIdentity(tmp_path / "control-host").identity
    identity.folder.mkdir(parents=True)
    identity.combined_file.write_text("torn", encoding="ascii")
    monkeypatch.setattr(agent_listener, "_refresh", lambda _: None)
    listening = asyncio.create_task(listen(bound, config, ServerState(), ConnectionLimits(), servers.append))
    await eventually(lambda: "the control plane's certificate: " in caplog.text)
    FleetOfTests().certify(tmp_path / "control-host" / "control", IdentityKind.CONTROL, "control")
    await eventually(lambda: servers)
    listening.cancel()
    for server in servers:
        server.close()
