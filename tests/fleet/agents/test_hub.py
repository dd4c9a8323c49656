"""The hub between agents and PostgreSQL: an agent that is stuck or broken does not affect others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import OperationalError, connections

from engine_agent.protocol.codec import BadMessage, encode
from engine_agent.protocol.messages import DownMessage, Fault, Heartbeat, Observed, Report
from engine_agent.protocol.states import AgentKind, EngineState
from fleet.agents.consumers import handlers
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHub, AgentSession
from fleet.agents.consumers.limits import HelloQueue
from fleet.agents.services.enrolment import AgentIdentity
from fleet.nodes.models import AgentListener, NodeReport
from fleet.nodes.services.reports import fault_record, reports_store
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from kernel import clock
from kernel.leases import lease_held_since
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.agents.agent_client import DEADLINE_S, eventually, hello, report_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]

READY = Report(seq=1, observed=Observed(state=EngineState.READY, cell="c1", generation=1, rank=0))


class Agent:
    """The far end of a connection: accepts messages, accepts none, or fails at each."""

    def __init__(self, node: str, *, stuck: bool = False, breaks: Exception | None = None) -> None:
        self.got: asyncio.Queue[DownMessage] = asyncio.Queue()
        self.closed: list[str] = []
        self._stuck, self._breaks = stuck, breaks
        identity = AgentIdentity(AgentKind.NODE, node, "us-east-1", node)
        self.session = AgentSession(identity, hello(node), send=self._take, close=self._close)

    async def _take(self, message: DownMessage) -> None:
        if self._stuck:
            await asyncio.Event().wait()
        if self._breaks:
            raise self._breaks
        await self.got.put(message)

    async def _close(self, reason: str) -> None:
        self.closed.append(reason)
        if self._stuck:
            await asyncio.Event().wait()

    async def receive_message(self) -> DownMessage:
        async with asyncio.timeout(DEADLINE_S):
            return await self.got.get()


@pytest_asyncio.fixture
async def hub() -> AsyncIterator[AgentHub]:
    made = AgentHub({AgentKind.NODE: NodeHandler()})
    made.start()
    yield made
    await made.stop()
    await sync_to_async(connections.close_all)()


async def joined(hub: AgentHub, agent: Agent) -> Agent:
    await sync_to_async(_record)(agent.session.identity.id)
    await hub.connect(agent.session)
    return agent


def _record(node: str) -> None:
    if not NodeReport.objects.filter(node_id=node).exists():
        rows.node(node, connected=False)


async def test_an_agent_that_takes_nothing_keeps_no_other_waiting(hub: AgentHub) -> None:
    await joined(hub, Agent("n-stuck", stuck=True))
    other = await joined(hub, Agent("n-well"))
    assert isinstance(await other.receive_message(), DownMessage)


async def test_an_agent_that_takes_nothing_is_cut_in_the_end(hub: AgentHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.agents.consumers.hub.SEND_LIMIT_S", 0.05)
    agent = await joined(hub, Agent("n-stuck", stuck=True))
    await eventually(lambda: agent.closed)
    assert agent.closed == ["it accepts no messages"]
    assert hub.sessions == {}


async def test_what_did_not_arrive_does_not_count_as_sent(hub: AgentHub) -> None:
    agent = await joined(hub, Agent("n-a", breaks=OSError("reset")))
    await eventually(lambda: agent.closed)
    assert agent.session.sent_version == -1


async def test_a_message_that_can_never_be_sent_is_not_tried_for_ever(
    hub: AgentHub, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await joined(hub, Agent("n-a", breaks=BadMessage("frame too long")))
    await eventually(lambda: agent.session.sent_version == 1)
    assert not agent.closed
    assert "n-a cannot be sent its version 1: frame too long" in caplog.text


async def test_an_older_connection_that_does_not_even_close_lets_the_newer_in(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.agents.consumers.hub.CLOSE_LIMIT_S", 0.05)
    older = await joined(hub, Agent("n-a", stuck=True))
    newer = await joined(hub, Agent("n-a"))
    await newer.receive_message()
    assert older.session.is_cut
    hub.receive(older.session, READY)
    hub.receive(newer.session, Report(seq=1, observed=Observed(state=EngineState.STARTING)))
    assert (await eventually(report_of("n-a", connected=True))).state == "starting"


async def test_reports_survive_a_database_that_is_away(hub: AgentHub, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await joined(hub, Agent("n-a"))
    failures = iter([OperationalError("away")])

    def flaky(batch: list[Any]) -> object:
        for failure in failures:
            raise failure
        return reports_store(batch)

    monkeypatch.setattr(handlers, "reports_store", flaky)
    hub.receive(agent.session, READY)
    assert (await eventually(report_of("n-a", connected=True))).state == "ready"


async def test_a_report_names_the_web_process_that_received_it(hub: AgentHub) -> None:
    agent = await joined(hub, Agent("n-a"))
    hub.receive(agent.session, READY)
    assert (await eventually(report_of("n-a", connected=True))).listener == hub.listener
    hub.disconnect(agent.session)
    assert (await eventually(report_of("n-a", connected=False, state="ready"))).listener == hub.listener
    assert await eventually(AgentListener.objects.filter(id=hub.listener, since__isnull=False).exists)


async def test_heartbeats_keep_a_report_without_storing_anything(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await joined(hub, Agent("n-a"))
    hub.receive(agent.session, READY)
    first = await eventually(report_of("n-a", connected=True))
    monkeypatch.setattr(handlers, "reports_store", refuse)
    for _ in range(3):
        hub.receive(agent.session, Heartbeat(seq=1))
        await asyncio.sleep(0)
    assert await eventually(AgentListener.objects.filter(id=hub.listener, until__gt=first.last_seen_at).exists)
    assert (await eventually(report_of("n-a"))).last_seen_at == first.last_seen_at


def refuse(batch: list[Any]) -> list[str]:
    raise AssertionError(f"stored {batch}")


async def test_silence_on_an_open_connection_is_stored_with_its_beginning_and_so_is_its_end(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await joined(hub, Agent("n-a"))
    hub.receive(agent.session, READY)
    assert not (await eventually(report_of("n-a", connected=True))).quiet
    agent.session.heard_at_s -= 60
    silent = await eventually(report_of("n-a", quiet=True, connected=True))
    assert (clock.now() - silent.last_seen_at).total_seconds() > 55
    hub.receive(agent.session, Heartbeat(seq=1))
    back = await eventually(report_of("n-a", quiet=False))
    assert back.last_seen_at > silent.last_seen_at


async def test_the_next_heartbeat_is_taken_from_the_connection_unless_it_matters(hub: AgentHub) -> None:
    agent, expected = await joined(hub, Agent("n-a")), list[bytes]()
    agent.session.expect_heartbeat = expected.append
    hub.receive(agent.session, READY)
    assert expected == [encode(Heartbeat(seq=1))]
    assert not hub.take_heartbeat(agent.session), "so soon after another message, it counts towards the limits"
    agent.session.heard_at_s = heard_at_s = agent.session.heard_at_s - 2
    assert hub.take_heartbeat(agent.session)
    assert agent.session.heard_at_s > heard_at_s
    for changes in ({"is_quiet": True}, {"is_quiet": False, "is_cut": True}):
        agent.session.heard_at_s = heard_at_s
        for name, value in changes.items():
            setattr(agent.session, name, value)
        assert not hub.take_heartbeat(agent.session)


@pytest.mark.parametrize("seq", [0, 2])
async def test_a_heartbeat_for_another_report_is_refused(hub: AgentHub, seq: int) -> None:
    agent = await joined(hub, Agent("n-a"))
    with pytest.raises(BadMessage, match="a heartbeat for report 1, and the last one was 0"):
        hub.receive(agent.session, Heartbeat(seq=1))
    hub.receive(agent.session, READY)
    with pytest.raises(BadMessage, match=f"a heartbeat for report {seq}, and the last one was 1"):
        hub.receive(agent.session, Heartbeat(seq=seq))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["line", "door"])
async def test_silence_before_a_web_process_that_is_behind_does_not_count(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    turned_away = False
    monkeypatch.setattr(HelloQueue, "has_waiting", property(lambda _: turned_away and where == "line"))
    hub.is_listener_full = lambda: turned_away and where == "door"
    monkeypatch.setattr("fleet.agents.consumers.hub.MEASURED_EVERY_S", 0.01)
    listened = await eventually(lambda: lease_held_since(name=LISTENING_LEASE, now=clock.now()))
    turned_away = True
    assert await eventually(AgentListener.objects.filter(id=hub.listener, since__isnull=True).exists)
    for _ in range(2):  # a renewal from before may still be in progress
        assert await eventually(lambda: lease_held_since(name=LISTENING_LEASE, now=clock.now()) is None)
        behind = await sync_to_async(AgentListener.objects.get)(id=hub.listener)
        assert await eventually(AgentListener.objects.filter(id=hub.listener, until__gt=behind.until).exists)
    turned_away = False
    monkeypatch.setattr("fleet.agents.consumers.limits.SETTLES_WITHIN_S", 0.0)
    assert await eventually(lambda: lease_held_since(name=LISTENING_LEASE, now=clock.now())) > listened


@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_web_process_that_stores_nothing_sends_its_agents_to_another_if_there_is_one(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch, settings: Any, hosts: int
) -> None:
    settings.AGENT_URLS = ["https://host:1"] * hosts
    monkeypatch.setattr("fleet.agents.consumers.hub.MEASURED_EVERY_S", 0.01)
    monkeypatch.setattr("fleet.agents.consumers.hub.STORES_AGAIN_WITHIN_S", 0.05)
    tries: list[int] = []

    def fails(batch: list[Any]) -> None:
        tries.append(len(batch))
        raise OperationalError("away")

    monkeypatch.setattr(handlers, "reports_store", fails)
    agent = await joined(hub, Agent("n-a"))
    hub.receive(agent.session, READY)
    await eventually(lambda: agent.closed if hosts > 1 else len(tries) > 1)
    assert agent.closed == (["this host stores no reports"] if hosts > 1 else [])


async def test_a_report_that_cannot_be_stored_does_not_make_the_database_count_as_away(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def fails(batch: list[Any]) -> None:
        tries.append(hub._stored_at_s)
        raise ValueError("one report is wrong")

    monkeypatch.setattr(handlers, "reports_store", fails)
    agent = await joined(hub, Agent("n-a"))
    hub.receive(agent.session, READY)
    await eventually(lambda: len(tries) > 1)
    assert tries[1] > tries[0]


async def test_evidence_survives_a_database_that_is_away_and_poison_goes_alone(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await joined(hub, Agent("n-a"))
    failures = iter([OperationalError("away")])

    def flaky(**fault: Any) -> None:
        if fault["signature"] == "poison":
            raise ValueError("no column takes this")
        for failure in failures:
            raise failure
        fault_record(**fault)

    monkeypatch.setattr(handlers, "fault_record", flaky)
    for signature in ("poison", "one", "two"):
        hub.receive(agent.session, Fault(signature=signature, summary=""))
    kinds = Event.objects.order_by("id").values_list("kind", flat=True)
    assert await eventually(lambda: list(kinds.all()) == ["fault.one", "fault.two"])
