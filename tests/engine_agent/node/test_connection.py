"""The agent's connection to the control plane: enrols, sends hello and its newest state, and reconnects."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_agent.node.connection import (
    AgentConnection,
    ConnectionSettings,
    backoff_s,
    report_interval_s,
    retry_after_s,
)
from engine_agent.node.enrolment import NONCE_FILE, Enrolment
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import ApiKey, IngressObserved, IngressReport, RoutingTable
from engine_agent.protocol.messages import (
    PROTOCOL_VERSION,
    Fault,
    Heartbeat,
    Hello,
    Observed,
    Order,
    Refused,
    Report,
)
from engine_agent.protocol.states import AgentKind, EngineState
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually

JOIN_TOKEN = "join-1"
FAST = ConnectionSettings(backoff_min_s=0.01, backoff_max_s=0.05, refused_backoff_s=0.2)
HELLO = Hello(protocol=PROTOCOL_VERSION, kind=AgentKind.INGRESS, id="i-a", boot_id="b", agent_version="0")


class Agent:
    """A connection under test and the orders that it received."""

    def __init__(self, plane: FakeControlPlane, home: Path, join_token: str | None = JOIN_TOKEN) -> None:
        self.told: list[Order] = []
        self.connection = AgentConnection(
            enrolment=Enrolment(plane.url, AgentKind.INGRESS, "i-a", home, join_token),
            hello=lambda: HELLO,
            on_message=self.told.append,
            settings=FAST,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Agent"]:
        task = asyncio.create_task(self.connection.run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def report(self, revision: int) -> None:
        self.connection.send(IngressReport(seq=0, observed=IngressObserved(revision=revision)))


@pytest.fixture
def plane() -> FakeControlPlane:
    return FakeControlPlane()


def table(revision: int) -> RoutingTable:
    return RoutingTable(revision=revision, region="r", pools=())


@pytest.mark.asyncio
async def test_enrols_once_keeps_the_credential_private_and_says_hello_first(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    async with plane.running():
        for _ in range(2):
            async with Agent(plane, tmp_path).running():
                seen = len(plane.received)
                await eventually(lambda seen=seen: len(plane.received) > seen)  # type: ignore[misc]
    (asked,) = plane.enrolled
    nonce = asked.pop("nonce")
    assert asked == {"kind": "ingress", "id": "i-a"}
    kept = tmp_path / NONCE_FILE
    assert (kept.read_text().strip(), kept.stat().st_mode & 0o777) == (nonce, 0o600)
    assert plane.received == [HELLO, HELLO]
    assert stat.S_IMODE((tmp_path / "credential").stat().st_mode) == 0o600


@pytest.mark.asyncio
async def test_only_the_newest_report_waits_and_every_connection_hears_it_again(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    async with Agent(plane, tmp_path).running() as agent:
        for revision in range(5):
            agent.report(revision)
        async with plane.running():
            await eventually(lambda: plane.reports)
        async with plane.running():
            await eventually(lambda: len(plane.reports) == 2)
            agent.report(9)
            await eventually(lambda: len(plane.reports) == 3)
    assert [(report.seq, report.observed.revision) for report in plane.of(IngressReport)] == [(1, 4), (1, 4), (2, 9)]
    assert len(plane.enrolled) == 1


@pytest.mark.asyncio
async def test_what_still_holds_is_confirmed_and_every_connection_starts_with_a_report(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    idle, failed = (Report(seq=0, observed=Observed(state)) for state in (EngineState.IDLE, EngineState.FAILED))
    async with Agent(plane, tmp_path).running() as agent:
        async with plane.running():
            for sent, report in enumerate((idle, idle, idle, failed, failed), start=1):
                agent.connection.send(report)
                await eventually(lambda sent=sent: len(sent_by(plane)) == sent)  # type: ignore[misc]
            agent.connection.send(idle)
            await eventually(lambda: len(sent_by(plane)) == 6)
        async with plane.running():
            await eventually(lambda: len(sent_by(plane)) == 7)
    reports = [each.seq if isinstance(each, Report) else f"holds: {each.seq}" for each in sent_by(plane)]
    assert reports == [1, "holds: 1", "holds: 1", 2, 3, 4, 1]


def sent_by(plane: FakeControlPlane) -> list[Report | Heartbeat]:
    return [each for each in plane.received if isinstance(each, Report | Heartbeat)]


@pytest.mark.asyncio
async def test_hands_over_what_it_is_told_and_outlives_a_broken_frame(plane: FakeControlPlane, tmp_path: Path) -> None:
    plane.greeting = [table(1)]
    async with plane.running(), Agent(plane, tmp_path).running() as agent:
        await eventually(lambda: agent.told == [table(1)])
        await plane.push_text("{")
        await plane.push(table(2))
        await eventually(lambda: agent.told == [table(1), table(2)])
        assert plane.connections == 1


@pytest.mark.asyncio
async def test_faults_wait_for_a_connection_and_are_sent_once(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with Agent(plane, tmp_path).running() as agent:
        agent.connection.send_fault(Fault("s", "one"))
        agent.connection.send_fault(Fault("s", "two"))
        async with plane.running():
            await eventually(lambda: len(plane.of(Fault)) == 2)
            await plane.hang_up()
            await eventually(lambda: plane.connections == 2)
    assert [fault.summary for fault in plane.of(Fault)] == ["one", "two"]


@pytest.mark.asyncio
async def test_a_credential_the_control_plane_forgot_is_replaced(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with plane.running(), Agent(plane, tmp_path).running():
        await eventually(lambda: plane.connections == 1)
        plane.credentials.clear()
        await plane.hang_up()
        await eventually(lambda: plane.connections == 2)
    first, second = plane.enrolled
    assert first == second, "the same nonce, or a token would not be taken twice"


@pytest.mark.asyncio
async def test_an_agent_that_enrols_anew_shows_the_certificate_from_before_no_more(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    """The enrolment revoked it, so TLS would reject it."""
    identity = FleetOfTests().certify(tmp_path, IdentityKind.INGRESS, "i-a")
    async with plane.running(), Agent(plane, tmp_path).running():
        await eventually(lambda: plane.connections == 1)
    assert identity.has_bundle
    assert not identity.has_certificate


@pytest.mark.asyncio
async def test_a_refused_join_token_is_said_and_tried_again_slowly(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with plane.running(), Agent(plane, tmp_path, join_token="stale").running() as agent:
        await eventually(lambda: "401: unknown join token" in agent.connection.status.reason)
        plane.join_tokens.add("stale")
        await eventually(lambda: agent.connection.status.connected)


@pytest.mark.asyncio
async def test_without_credential_and_token_it_says_what_is_missing(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with plane.running(), Agent(plane, tmp_path, join_token=None).running() as agent:
        await eventually(lambda: "no usable credential and was given no join token" in agent.connection.status.reason)


@pytest.mark.asyncio
async def test_a_refusal_for_good_is_said_and_tried_again_slowly(plane: FakeControlPlane, tmp_path: Path) -> None:
    plane.greeting = [Refused("node was retired", retry=False)]
    async with plane.running(), Agent(plane, tmp_path).running() as agent:
        await eventually(lambda: agent.connection.status.reason.endswith("node was retired"))
        plane.greeting = [table(1)]
        await eventually(lambda: agent.told == [table(1)])
    assert plane.connections == 2


def test_backoff_grows_from_its_minimum_to_its_maximum_and_jitters() -> None:
    settings = ConnectionSettings()
    assert [backoff_s(settings, failures, 0.0) for failures in (0, 1, 9)] == [0.2, 0.2, 0.2]
    assert [round(backoff_s(settings, failures, 1.0), 3) for failures in (0, 1, 2, 3, 9, 99)] == [
        0.2, 0.4, 0.8, 1.6, 5.0, 5.0,
    ]  # fmt: skip


def test_reports_come_every_two_seconds_give_or_take_a_tenth() -> None:
    assert (report_interval_s(0.0), report_interval_s(0.5), report_interval_s(1.0)) == (1.8, 2.0, 2.2)


def test_a_server_that_is_no_web_address_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Enrolment("localhost:8000", AgentKind.NODE, "n", tmp_path)


@pytest.mark.asyncio
async def test_says_hello_anew_when_what_it_says_has_changed(plane: FakeControlPlane, tmp_path: Path) -> None:
    async with plane.running(), Agent(plane, tmp_path).running() as agent:
        await eventually(lambda: plane.received == [HELLO])
        agent.connection.resend_hello()
        await eventually(lambda: plane.received == [HELLO, HELLO])


@pytest.mark.asyncio
async def test_a_table_longer_than_a_frame_is_handed_over_whole_and_once(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    long = RoutingTable(1, "r", (), keys=tuple(ApiKey(f"{n:08x}", "d" * 64, "t", "batch") for n in range(4000)))
    async with plane.running(), Agent(plane, tmp_path).running() as agent:
        await eventually(lambda: plane.received)
        await plane.push(long)
        await plane.push(table(2))
        await eventually(lambda: len(agent.told) == 2)
    assert agent.told == [long, table(2)]


@pytest.mark.parametrize(
    ("stated", "draw", "waits_s"),
    [
        (None, 0.5, 0.0),
        ("", 0.5, 0.0),
        ("4", 0.0, 2.0),
        ("4", 0.5, 4.0),
        ("4", 1.0, 6.0),
        ("100000", 0.5, 120.0),
        ("-4", 0.5, 0.0),
        ("4.5", 0.5, 0.0),
        ("\u0664", 0.5, 0.0),
        ("9" * 5000, 0.5, 0.0),
        ("Mon, 23 Nov 2026 01:00:00 GMT", 0.5, 0.0),
    ],
)
def test_an_agent_that_is_told_when_to_come_again_comes_around_then(
    stated: str | None, draw: float, waits_s: float
) -> None:
    assert retry_after_s(stated, draw) == waits_s


@pytest.mark.asyncio
async def test_a_crowded_control_plane_is_asked_again_when_it_says(
    plane: FakeControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane.retry_after = b"60"
    (tmp_path / "credential").write_text("sw_1_secret")
    async with plane.running(), Agent(plane, tmp_path).running() as agent:
        await eventually(lambda: "answered 503" in agent.connection.status.reason)
    (said,) = (record.getMessage() for record in caplog.records if "answered 503" in record.getMessage())
    assert 30.0 <= float(said.rpartition("next attempt in ")[2].removesuffix(" s")) <= 90.0
