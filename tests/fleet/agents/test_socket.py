"""The control plane's end of agents' sockets, with PostgreSQL and Valkey: authentication, storage of reports, and
answers."""

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections

from engine_agent.protocol.codec import encode
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import PROTOCOL_VERSION, Desired, Fault, Health, LogTail, Observed, Refused, Report
from engine_agent.protocol.states import AgentKind, EngineState
from fleet.agents.consumers import hub
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHub
from fleet.agents.consumers.limits import CredentialFilter, CredentialVerdict, HelloQueue, Lane
from fleet.agents.consumers.socket import AgentSocket
from fleet.cells.services import cell_start
from fleet.nodes.models import AgentCredential, Node, NodeLog
from fleet.nodes.services.reports import node_logs_request
from fleet.reconcile.planning.decisions import StartCell
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from kernel import clock
from kernel.leases import lease_held_since
from tests.fleet import rows
from tests.fleet.agents.agent_client import (
    DEADLINE_S,
    AgentClient,
    client_with,
    connected,
    credential,
    eventually,
    hello,
    report_of,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]

READY = Report(
    seq=1,
    observed=Observed(state=EngineState.READY, cell="c1", generation=1, rank=0, engine_pid=4711),
    health=Health(ok=True),
    load=Load(in_flight=3),
)


STRANGER = f"Bearer sw_00000000000000_{'5e' * 24}"


@pytest_asyncio.fixture
async def socket() -> AsyncIterator[AgentSocket]:
    hub = AgentHub({AgentKind.NODE: NodeHandler()})
    yield AgentSocket(hub)
    await hub.stop()
    await sync_to_async(connections.close_all)()


@pytest.mark.parametrize("header", ["Bearer nonsense", "Bearer sw_00000000000000_11", "Basic abc", ""])
async def test_without_a_credential_nobody_gets_in(socket: AgentSocket, header: str) -> None:
    assert await AgentClient(socket, header).connect() == {"type": "websocket.close", "code": 4403}


async def test_a_node_is_told_its_whole_desired_state_on_connecting(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        assert await client.receive_message() == Desired(node="n-a", version=1, assignment=None)
        assert await eventually(lambda: Node.objects.get(id="n-a").fingerprint) == {"kernel": "6"}


async def test_a_change_is_pushed_to_the_node_it_concerns(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.receive_message()
        await sync_to_async(rows.cell)("c1", state=CellState.PENDING, generation=0)
        decision = StartCell("c1", CellState.PENDING, 0, ("n-a",), "placed")
        await sync_to_async(cell_start)(decision, now=clock.now())
        desired = await client.receive_message()
        assert (desired.version, desired.assignment.cell, desired.assignment.generation) == (2, "c1", 1)


async def test_a_report_is_kept_and_its_connection_too(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.send_message(encode(READY))
        stored = await eventually(report_of("n-a", connected=True))
        assert (stored.state, stored.cell, stored.engine_pid, stored.load["in_flight"]) == ("ready", "c1", 4711, 3)
    kept = await eventually(report_of("n-a", connected=False))
    assert kept.state == "ready"


async def test_of_many_reports_the_latest_is_kept(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        for number in range(30):
            report = Report(seq=number, observed=READY.observed, load=Load(in_flight=number))
            await client.send_message(encode(report))
        assert await eventually(report_of("n-a", load__in_flight=29))


async def test_a_fault_is_written_into_the_timeline_with_its_evidence(socket: AgentSocket) -> None:
    from kernel.models import Event

    async with connected(socket) as client:
        fault = Fault(signature="xid-79", summary="GPU fell off the bus", evidence={"gpu": 3})
        await client.send_message(encode(fault))
        event = await eventually(lambda: Event.objects.filter(kind="fault.xid-79").first())
        assert (event.node, event.detail, event.tone) == ("n-a", {"gpu": 3}, "bad")


async def test_who_reads_logs_is_told_to_the_agent_and_its_lines_are_kept(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.receive_message()
        await sync_to_async(node_logs_request)(nodes=["n-a"], now=clock.now())
        assert (await client.receive_message()).logs is not None
        await client.send_message(encode(LogTail(cell=None, generation=0, logs={"agent": ("connected",)})))
        kept = await eventually(lambda: NodeLog.objects.filter(node="n-a", said_at__isnull=False).first())
        assert kept.logs == {"agent": ["connected"]}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (encode(READY), "first message must be a hello"),
        (encode(hello("n-b")), "the credential is for node n-a, not node n-b"),
        (b"{", "truncated"),
        (b'{"type": "report", "telemetry": {"x": ' + b"[" * 5000, "recursion"),
    ],
)
async def test_a_wrong_beginning_is_refused_with_the_reason(socket: AgentSocket, frame: bytes, message: str) -> None:
    client = client_with(socket, await credential("n-a"))
    await client.connect()
    await client.send_message(frame)
    refusal = await client.receive_message()
    assert isinstance(refusal, Refused)
    assert message in refusal.reason


async def test_the_protocol_before_is_served(socket: AgentSocket) -> None:
    client = client_with(socket, await credential("n-a"))
    await client.connect()
    await client.send_message(encode(hello(protocol=PROTOCOL_VERSION - 1)))
    assert isinstance(await client.receive_message(), Desired)
    await client.disconnect()


@pytest.mark.parametrize(
    ("protocol", "remedy"),
    [(PROTOCOL_VERSION - 2, "join it again"), (PROTOCOL_VERSION + 1, "upgrade the control plane first")],
)
async def test_others_are_refused_in_one_sentence_and_the_timeline_says_so_once(
    socket: AgentSocket, protocol: int, remedy: str
) -> None:
    from kernel.models import Event

    text, refusals, events = await credential("n-a"), [], []
    for number in range(2):
        client = client_with(socket, text)
        await client.connect()
        stated = hello(protocol=protocol)
        await client.send_message(encode(msgspec.structs.replace(stated, agent_version=f"1\0{number}")))
        refusal = await client.receive_message()
        assert isinstance(refusal, Refused)
        assert not refusal.retry
        refusals.append(refusal.reason)
        spoken = f"and this control plane {PROTOCOL_VERSION} and {PROTOCOL_VERSION - 1}: "
        assert refusal.reason.startswith(f"node n-a, version 1{number}, speaks protocol {protocol}, {spoken}")
        assert remedy in refusal.reason
        events = await eventually(lambda: list(Event.objects.filter(kind="agent.refused")))  # before the next write
    assert [(event.message, event.node) for event in events] == [(refusals[0], "n-a")]  # whatever else it states


async def test_a_flood_is_cut(socket: AgentSocket) -> None:
    async with connected(socket) as client:
        await client.receive_message()
        for _ in range(150):
            await client.send_message(encode(READY))
        refusal = await client.receive_message()
        assert isinstance(refusal, Refused)
        assert "more than 20 messages a second" in refusal.reason


async def test_a_newer_connection_takes_the_place_of_an_older_one(socket: AgentSocket) -> None:
    secret = await credential("n-a")
    older, newer = client_with(socket, secret), client_with(socket, secret)
    for client in (older, newer):
        await client.connect()
        await client.send_message(encode(hello()))
        await client.receive_message()
    assert (await older.receive_output(timeout=DEADLINE_S))["type"] == "websocket.close"
    await newer.send_message(encode(READY))
    assert await eventually(report_of("n-a", connected=True))
    await newer.disconnect()


async def test_a_revoked_credential_cuts_the_open_socket(socket: AgentSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.agents.consumers.hub.REVOKED_EVERY_S", 0.1)
    async with connected(socket) as client:
        await client.receive_message()
        await sync_to_async(AgentCredential.objects.update)(revoked_at=clock.now())
        closing = await client.receive_output(timeout=DEADLINE_S)
        assert (closing["type"], closing["reason"]) == ("websocket.close", "its credential was revoked")


async def test_nothing_counts_that_an_agent_says_after_it_was_cut(socket: AgentSocket) -> None:
    secret = await credential("n-a")
    older, newer = client_with(socket, secret), client_with(socket, secret)
    for client in (older, newer):
        await client.connect()
        await client.send_message(encode(hello()))
        await client.receive_message()
    await older.send_message(encode(READY))
    await older.wait(timeout=DEADLINE_S)
    await newer.send_message(encode(Report(seq=1, observed=Observed(state=EngineState.IDLE))))
    assert (await eventually(report_of("n-a", connected=True))).state == "idle"
    await newer.disconnect()


def away(*_: object, **__: object) -> None:
    raise DatabaseError("the server closed the connection")


async def test_while_the_database_is_away_an_agent_of_another_protocol_is_refused_all_the_same(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_with(socket, await credential("n-a"))
    await client.connect()
    monkeypatch.setattr(hub, "agent_refused", away)
    await client.send_message(encode(hello(protocol=PROTOCOL_VERSION + 1)))
    assert isinstance(await client.receive_message(), Refused)
    await client.wait(timeout=DEADLINE_S)  # raises the socket's exception


async def test_while_the_database_is_away_a_credential_is_not_refused(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await credential("n-a")
    monkeypatch.setattr("fleet.agents.consumers.hub.agents_identify", away)
    assert (await client_with(socket, secret).connect())["status"] == 503


async def test_an_agent_whose_hello_cannot_be_stored_gets_a_time_to_retry(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_with(socket, await credential("n-a"))
    await client.connect()
    monkeypatch.setattr("fleet.agents.consumers.handlers.hellos_store", away)
    await client.send_message(encode(hello()))
    refusal = await client.receive_message()
    assert isinstance(refusal, Refused)
    assert refusal.retry
    assert socket.hub.sessions == {}


async def test_while_somebody_listens_the_fleet_knows_it(socket: AgentSocket) -> None:
    async with connected(socket):
        assert await eventually(lambda: lease_held_since(name=LISTENING_LEASE, now=clock.now()))


async def test_strangers_whose_look_ups_take_long_hold_up_nobody_who_is_known(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, looked_up = threading.Event(), threading.Event()

    def slow(credentials: list[str]) -> list[None]:
        looked_up.set()
        assert held.wait(DEADLINE_S)
        return [None] * len(credentials)

    try:
        async with connected(socket) as client:
            await client.receive_message()
            monkeypatch.setattr(hub, "agents_identify", slow)
            headers = (f"Bearer sw_00000000000000_{number:048x}" for number in range(50))
            strangers = [asyncio.create_task(AgentClient(socket, header).connect()) for header in headers]
            assert await eventually(looked_up.is_set)
            await client.send_message(encode(READY))
            assert await eventually(report_of("n-a", connected=True))
            await sync_to_async(rows.cell)("c1", state=CellState.PENDING, generation=0)
            decision = StartCell("c1", CellState.PENDING, 0, ("n-a",), "placed")
            await sync_to_async(cell_start)(decision, now=clock.now())
            assert (await client.receive_message()).version == 2
    finally:
        held.set()
    assert {message["code"] for message in await asyncio.gather(*strangers)} == {4403}


async def test_a_flood_of_unknown_credentials_is_not_looked_up_and_delays_no_agent(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential_filter = CredentialFilter(now=lambda: 0.0)  # no lookup returns in the meantime
    monkeypatch.setattr(socket.hub, "credential_filter", credential_filter)
    while credential_filter.check(STRANGER) is CredentialVerdict.LOOKED_UP:
        pass
    secret = await credential("n-a")
    socket.hub.start()
    assert await eventually(lambda: credential_filter.check(f"Bearer {secret}") is CredentialVerdict.LOOKED_UP)
    answer = await AgentClient(socket, STRANGER).connect()
    assert (answer["type"], answer["status"]) == ("websocket.http.response.start", 429)
    assert dict(answer["headers"])[b"retry-after"] == b"2"
    assert await client_with(socket, secret).connect() == {"type": "websocket.accept"}


async def test_who_finds_no_room_is_told_when_to_come_again(
    socket: AgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await credential("n-a")
    monkeypatch.setattr("fleet.agents.consumers.limits.AT_ONCE", 1)
    monkeypatch.setattr("fleet.agents.consumers.limits.SUPPOSED_PER_S", 0.25)
    socket.hub.hello_queue = HelloQueue(now=lambda: 0.0)
    first = client_with(socket, secret)
    assert await first.connect() == {"type": "websocket.accept"}
    for waits_s in (4, 8):
        answer = await client_with(socket, secret).connect()
        assert (answer["status"], answer["headers"]) == (503, [(b"retry-after", str(waits_s).encode())])
    await first.send_message(encode(hello()))
    await first.receive_message()
    assert await client_with(socket, secret).connect() == {"type": "websocket.accept"}


async def test_an_agent_may_move_from_one_web_process_to_another(socket: AgentSocket) -> None:
    other = AgentSocket(AgentHub({AgentKind.NODE: NodeHandler()}))
    secret = await credential("n-a")
    older, newer = client_with(socket, secret), client_with(other, secret)
    for client in (older, newer):
        await client.connect()
        await client.send_message(encode(hello()))
        await client.receive_message()
        await client.send_message(encode(READY))
        await eventually(report_of("n-a", connection=client.application.hub.sessions["n-a"].key))
    session = other.hub.sessions["n-a"]
    await older.disconnect()
    await socket.hub.in_database(Lane.REPORTS, socket.hub.handlers[AgentKind.NODE].flush)
    assert await sync_to_async(report_of("n-a", connected=True, connection=session.key))()
    await newer.disconnect()
    assert await eventually(report_of("n-a", connected=False))
    await other.hub.stop()


async def test_no_request_can_take_the_connections_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have used up their pool of one connection."""
    before = connections.settings["default"]
    options = {**before["OPTIONS"], "pool": {"min_size": 1, "max_size": 1, "timeout": 1}}
    monkeypatch.setitem(connections.settings, "default", {**before, "OPTIONS": options})
    hub = AgentHub({AgentKind.NODE: NodeHandler()})
    seen = [await hub.in_database(lane, lambda: dict(connections["default"].settings_dict["OPTIONS"])) for lane in Lane]
    await hub.stop()
    assert [each for each in seen if "pool" in each] == []
