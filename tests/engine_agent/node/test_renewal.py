"""An agent's certificate over its connection: requested at first, renewed in time, and with other authorities."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine_agent.node import renewal
from engine_agent.node.identity import Identity
from engine_agent.node.renewal import CertificateRenewal
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import Certificate, CertificateRequest, Trust
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import eventually

pytestmark = pytest.mark.asyncio
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
    """What the control plane answers, for the key of the request."""
    signed = authority.sign(NODE, "n-1", request.request, now=now)
    return Certificate(signed.pem, Trust(authority.bundle, authority.revoked))


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


async def test_half_of_its_life_later_it_is_renewed(authority: FleetOfTests, tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    authority.renew(agent.identity, NODE, "n-1", now=datetime.now(UTC) - timedelta(hours=13))
    async with agent.connected():
        await eventually(agent.requested(1))
    assert agent.requests[0].believed == agent.identity.bundle_digest() != ""


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
    assert "is for another key" in caplog.text


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


async def test_a_clock_that_stays_wrong_is_said_once_and_asked_about_more_and_more_rarely(
    authority: FleetOfTests, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "REQUEST_AGAIN_S", 0.001)
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
    assert [renewal.request_again_s(tries) for tries in (0, 1, 2, 3, 99)] == [30.0, 30.0, 60.0, 120.0, 600.0]
