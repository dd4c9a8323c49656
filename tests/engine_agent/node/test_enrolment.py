"""Agents change servers when one does not answer, and renew their certificates in time."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine_agent.node import enrolment
from engine_agent.node.connection import AgentConnection, ConnectionSettings
from engine_agent.node.enrolment import (
    MAX_SERVERS,
    SILENT_HOST_S,
    CertificateRenewal,
    Enrolment,
    Servers,
    notice_silence,
)
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import PROTOCOL_VERSION, Certificate, CertificateRequest, Hello, Trust
from engine_agent.protocol.states import AgentKind
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.ports import free_port

FAST = ConnectionSettings(
    backoff_min_s=0.01, backoff_max_s=0.05, refused_backoff_s=0.2, other_server_s=0.01, other_open_timeout_s=0.1
)
HELLO = Hello(protocol=PROTOCOL_VERSION, kind=AgentKind.INGRESS, id="i-a", boot_id="b", agent_version="0")


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and sends nothing, like a host whose processes hang."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def agent_of(home: Path, *urls: str) -> AsyncIterator[AgentConnection]:
    enrolment = Enrolment(",".join(urls), AgentKind.INGRESS, "i-a", home)
    connection = AgentConnection(enrolment=enrolment, hello=lambda: HELLO, on_message=print, settings=FAST)
    task = asyncio.create_task(connection.run())
    try:
        yield connection
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def plane_that_knows(credential: str) -> FakeControlPlane:
    plane = FakeControlPlane()
    plane.credentials.add(credential)
    return plane


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "credential").write_text("known")
    return tmp_path


@pytest.mark.asyncio
async def test_an_agent_goes_to_another_server_when_its_own_is_gone_and_back(home: Path) -> None:
    one, other = plane_that_knows("known"), plane_that_knows("known")
    async with agent_of(home, one.url, other.url) as agent:
        async with one.running():
            await eventually(lambda: one.connections == 1)
        async with other.running():
            await eventually(lambda: other.connections == 1 and agent.status.connected)
        async with one.running():
            await eventually(lambda: one.connections == 2)


@pytest.mark.asyncio
async def test_servers_that_say_nothing_or_nobody_knows_do_not_keep_an_agent_from_the_one_that_answers(
    home: Path,
) -> None:
    one = plane_that_knows("known")
    with silent_server() as silent:
        async with agent_of(home, silent, f"http://127.0.0.1:{free_port()}", one.url), one.running():
            await eventually(lambda: one.connections == 1)


@pytest.mark.asyncio
async def test_a_server_that_is_full_sends_an_agent_to_the_next_and_not_to_bed(home: Path) -> None:
    full, other = plane_that_knows("known"), plane_that_knows("known")
    full.retry_after = b"120"
    async with full.running(), other.running(), agent_of(home, full.url, other.url):
        await eventually(lambda: other.connections == 1)


@pytest.mark.asyncio
async def test_an_agent_keeps_the_servers_that_it_is_told(home: Path) -> None:
    one, other = plane_that_knows("known"), plane_that_knows("known")
    one.greeting = [Trust("no bundle", "", (one.url, other.url))]
    async with one.running(), agent_of(home, one.url):
        await eventually((home / "servers.json").exists)
    async with other.running(), agent_of(home, one.url):  # its command line is out of date
        await eventually(lambda: other.connections == 1)


def test_agents_begin_at_different_servers(tmp_path: Path) -> None:
    urls = [f"https://c{number}:8443" for number in range(3)]
    begun = {Servers(",".join(urls), tmp_path, f"n-{number:08x}").current for number in range(40)}
    assert begun == set(urls)


def test_the_server_in_use_stays_when_others_are_named_unless_it_is_none_of_them(tmp_path: Path) -> None:
    servers = Servers("https://a:1,https://b:1/", tmp_path, "n-1")
    assert servers.are_several
    servers.failed()
    in_use = servers.current
    servers.update(["https://z:1", in_use, "https://y:1"])
    assert servers.current == in_use
    servers.update(["https://z:1"])
    assert servers.all == ("https://z:1",)


@pytest.mark.parametrize(
    "urls",
    [[], ["ftp://a"], ["https://"], ["https://a:b"], ["https://a b"], ["https://a/path"], ["https://a?q"], [7],
     ["https://" + "a" * 300], ["https://ä:1"], [f"https://c{number}" for number in range(MAX_SERVERS + 1)]],
)  # fmt: skip
def test_what_is_no_list_of_servers_changes_nothing(tmp_path: Path, urls: list[str]) -> None:
    servers = Servers("https://a:1", tmp_path, "n-1")
    servers.update(urls)
    assert servers.all == ("https://a:1",)
    assert list(tmp_path.iterdir()) == []
    if urls:
        with pytest.raises(ValueError, match=r"server must be|has 1 to 16 addresses|Port could not be"):
            Servers(",".join(map(str, urls)), tmp_path, "n-1")


def test_servers_that_were_kept_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    Servers("https://old:1", tmp_path, "n-1").update(["https://a:1"])
    assert Servers("https://moved:1", tmp_path, "n-1").all == ("https://a:1", "https://moved:1")


def test_a_torn_file_of_servers_leaves_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text('["https://')
    assert Servers("https://a:1", tmp_path, "n-1").all == ("https://a:1",)


def test_a_host_that_is_off_is_noticed_by_the_kernel() -> None:
    with socket.socket() as line:
        notice_silence(line)
        idle, interval, count = (
            line.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == SILENT_HOST_S
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_HOST_S * 1000


NODE = IdentityKind.NODE


class Agent:
    def __init__(self, home: Path) -> None:
        self.identity = Identity(home)
        self.changes = 0
        self.requests: list[CertificateRequest] = []
        self.renewal = CertificateRenewal(self.identity, lambda: 0.0, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def _send(self, request: CertificateRequest) -> None:
        self.requests.append(request)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.renewal.run(self._send))
        try:
            yield
        finally:
            running.cancel()

    def requested(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.requests) >= count


def answer(authority: FleetOfTests, request: CertificateRequest, now: datetime | None = None) -> Certificate:
    """The control plane's answer for the key of the request."""
    signed = authority.sign(NODE, "n-1", request.request, now=now)
    return Certificate(signed.pem, Trust(authority.bundle, authority.revoked))


@pytest.mark.asyncio
async def test_an_agent_without_a_certificate_requests_one_and_then_is_quiet(
    authority: FleetOfTests, tmp_path: Path
) -> None:
    agent = Agent(tmp_path)
    async with agent.connected():
        await eventually(agent.requested(1))
        await agent.renewal.take(answer(authority, agent.requests[0]))
        assert agent.identity.validity() is not None
        assert agent.changes == 1
    async with agent.connected():
        await asyncio.sleep(0.1)  # long enough for a request that must not come
        assert len(agent.requests) == 1


@pytest.mark.asyncio
async def test_half_of_its_life_later_it_is_renewed(authority: FleetOfTests, tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    authority.renew(agent.identity, NODE, "n-1", now=datetime.now(UTC) - timedelta(hours=13))
    async with agent.connected():
        await eventually(agent.requested(1))
    assert agent.requests[0].believed == agent.identity.bundle_digest() != ""


@pytest.mark.asyncio
async def test_other_authorities_are_believed_at_once_and_said_with_a_request(
    authority: FleetOfTests, tmp_path: Path
) -> None:
    agent = Agent(tmp_path)
    authority.renew(agent.identity, NODE, "n-1")
    async with agent.connected():
        authority.authorities.append(FleetOfTests().authorities[0])
        await agent.renewal.take(Trust(authority.bundle, authority.revoked))
        await eventually(agent.requested(1))
    assert agent.requests[0].believed == agent.identity.bundle_digest()
    assert agent.identity.bundle_file.read_text() == authority.bundle


@pytest.mark.asyncio
async def test_a_revocation_alone_is_kept_and_requests_nothing(authority: FleetOfTests, tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    authority.renew(agent.identity, NODE, "n-1")
    authority.revoked_serials.append("ab12")
    async with agent.connected():
        told = Trust(authority.bundle, authority.revoked)
        await agent.renewal.take(told)
        await asyncio.sleep(0.1)  # long enough for a request that must not come
    assert (agent.requests, agent.changes) == ([], 1)
    assert agent.identity.revoked_file.read_text() == told.revoked


@pytest.mark.asyncio
async def test_what_is_no_certificate_of_ours_changes_nothing(
    authority: FleetOfTests, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, other = Agent(tmp_path / "a"), Identity(tmp_path / "b")
    authority.renew(agent.identity, NODE, "n-1")
    before = agent.identity.stamp()
    foreign = authority.sign(NODE, "n-1", other.signing_request())
    await agent.renewal.take(Certificate(foreign.pem, Trust(authority.bundle, authority.revoked)))
    await agent.renewal.take(Trust("no bundle", ""))
    assert agent.identity.stamp() == before
    assert "is for a different key" in caplog.text


@pytest.mark.asyncio
async def test_a_clock_that_is_wrong_is_said_and_requests_are_not_repeated_without_end(
    authority: FleetOfTests, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path)
    async with agent.connected():
        await eventually(agent.requested(1))
        ahead = datetime.now(UTC) + timedelta(hours=2)
        await agent.renewal.take(answer(authority, agent.requests[0], now=ahead))
        await asyncio.sleep(0.1)  # long enough for a request that must not come
    assert len(agent.requests) == 1
    assert "set the clock" in caplog.text


@pytest.mark.asyncio
async def test_a_clock_that_stays_wrong_is_said_once_and_asked_about_more_and_more_rarely(
    authority: FleetOfTests, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "REQUEST_AGAIN_S", 0.001)
    agent = Agent(tmp_path)
    ahead = datetime.now(UTC) + timedelta(hours=2)
    async with agent.connected():
        for count in range(1, 6):
            await eventually(agent.requested(count))
            await agent.renewal.take(answer(authority, agent.requests[-1], now=ahead))
        await asyncio.sleep(0.25)  # in which there were a hundred
        assert len(agent.requests) < 12
    assert caplog.text.count("set the clock") == 1
    monkeypatch.undo()
    assert [enrolment.request_again_s(tries) for tries in (0, 1, 2, 3, 99)] == [30.0, 30.0, 60.0, 120.0, 600.0]
