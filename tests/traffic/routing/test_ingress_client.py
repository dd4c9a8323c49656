"""Streams, their limits, broken responses, and cancellation."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_agent.node.identity import peer_name
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind
from tests.engine_agent.authority import FleetOfTests
from tests.traffic.answering import ingress
from traffic.async_requests.planner import AttemptResponse
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services import ingress_client
from traffic.routing.services.ingress_client import (
    ResponseHead,
    StreamBroken,
    StreamLimits,
    ingress_post,
    ingress_stream,
)

pytestmark = pytest.mark.asyncio

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Switchyard-Cell: c-1\r\n\r\n"
QUICK = StreamLimits(first_s=5, silent_s=5, whole_s=10)
NOBODY = IngressAddress("i-x", "us-east-1", "127.0.0.1", 1)


@pytest.fixture(autouse=True)
def _plain_links(settings: Any) -> None:
    settings.PLAIN_LINKS = True


async def read(address: IngressAddress, limits: StreamLimits = QUICK) -> list[ResponseHead | bytes]:
    return [part async for part in ingress_stream(address, "/v1/x", b"{}", {"X-One": "1"}, limits)]


async def test_head_and_pieces_come_in_order() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"2\r\nab\r\n" + b"1\r\nc\r\n0\r\n\r\n")

    async with ingress(says) as address:
        head, *pieces = await read(address)
    assert isinstance(head, ResponseHead)
    assert (head.status, head.headers["x-switchyard-cell"]) == (200, "c-1")
    assert pieces == [b"ab", b"c"]


async def test_an_answer_that_breaks_off_is_told() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"2\r\nab\r\n")

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="broke off: peer closed connection"):
            await read(address)


@pytest.mark.parametrize(
    "limits", [StreamLimits(first_s=0.05), StreamLimits(silent_s=0.05), StreamLimits(whole_s=0.05)]
)
async def test_silence_ends_at_its_limit(limits: StreamLimits) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if limits.first_s > 1:
            writer.write(HEAD)
        await reader.read()

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="no data within"):
            await read(address, limits)


async def test_an_answer_without_end_is_cut() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"64\r\n" + b"x" * 100 + b"\r\n")

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="longer than 50 bytes"):
            await read(address, StreamLimits(max_bytes=50))


async def test_nobody_there_is_told() -> None:
    with pytest.raises(StreamBroken, match="cannot be reached"):
        await read(NOBODY)


async def test_who_stops_reading_cuts_the_connection() -> None:
    gone = asyncio.Event()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"1\r\na\r\n")
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with ingress(says) as address:
        parts = ingress_stream(address, "/v1/x", b"{}", {}, QUICK)
        assert isinstance(await anext(parts), ResponseHead)
        assert await anext(parts) == b"a"
        await parts.aclose()
        await asyncio.wait_for(gone.wait(), 60)


async def post(address: IngressAddress, limit_s: float = 60.0) -> AttemptResponse:
    return await ingress_post(address, "/v1/x", b"{}", {"X-One": "\u00e9"}, limit_s=limit_s, max_bytes=50)


async def test_a_whole_response_arrives_with_its_status_and_when_to_come_back() -> None:
    sent = bytearray()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno")

    async with ingress(says, sent) as address:
        assert await post(address) == AttemptResponse(503, b"no", retry_after_s=7.0)
    head = bytes(sent).decode("latin-1").lower().split("\r\n")
    assert head[0] == "post /v1/x http/1.1"
    assert sorted(head[1:-2]) == [
        "content-length: 2", "content-type: application/json",
        f"host: {address.address}:{address.port}", "x-one: \u00e9",
    ]  # fmt: skip


async def test_one_connection_carries_requests_until_an_end_closes_it() -> None:
    connections = 0

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")

    async with ingress(says) as address:
        assert [(await post(address)).status for _ in range(3)] == [200, 200, 200]
    assert connections == 2


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (HEAD + b"2\r\nab\r\n", "broke off: peer closed"),
        (b"", "broke off: Server disconnected"),
        (b"nonsense\r\n\r\n", "broke off"),
        (HEAD + b"64\r\n" + b"x" * 100 + b"\r\n", "longer than 50 bytes"),
    ],
)
async def test_a_response_that_is_none_has_its_reason_and_may_have_begun(response: bytes, reason: str) -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)

    async with ingress(says) as address:
        received = await post(address)
    assert (received.status, received.sent) == (None, True)
    assert reason in received.reason


async def test_a_response_that_takes_too_long_is_cut() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await reader.read()

    async with ingress(says) as address:
        received = await post(address, limit_s=0.1)
    assert (received.status, received.sent, received.reason) == (None, True, "no complete answer within 0.1 s")


async def test_an_ingress_that_is_away_has_begun_nothing() -> None:
    received = await post(NOBODY)
    assert (received.status, received.sent) == (None, False)
    assert "cannot be reached" in received.reason


@pytest.fixture
def fleet(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetOfTests:
    """A fleet whose control plane has a certificate and whose links use TLS."""
    settings.PLAIN_LINKS, settings.SWITCHYARD_HOME = False, tmp_path
    monkeypatch.setattr(ingress_client, "own_identity", lambda: ingress_client.OwnIdentity(tmp_path / "control"))
    fleet = FleetOfTests()
    fleet.certify(tmp_path / "control", IdentityKind.CONTROL, CONTROL_ID)
    return fleet


async def ok(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def test_both_ends_show_who_they_are(fleet: FleetOfTests, tmp_path: Path) -> None:
    came: list[str] = []

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(str(peer_name(writer.get_extra_info("ssl_object")).kind))
        await ok(reader, writer)

    identity = fleet.certify(tmp_path / "i-x", IdentityKind.INGRESS, "i-x")
    async with ingress(says, tls=identity.server_context()) as address:
        assert (await post(address)).status == 200
    assert came == ["control"]


@pytest.mark.parametrize(("kind", "subject"), [(IdentityKind.INGRESS, "i-y"), (IdentityKind.NODE, "n-0a1b2c3d")])
async def test_nothing_is_sent_to_whoever_has_another_name(
    fleet: FleetOfTests, tmp_path: Path, kind: IdentityKind, subject: str
) -> None:
    sent = bytearray()
    identity = fleet.certify(tmp_path / subject, kind, subject)
    async with ingress(ok, sent, tls=identity.server_context()) as address:
        received = await post(address)
    assert (received.status, received.sent, bytes(sent)) == (None, False, b"")
    assert "cannot be reached" in received.reason


async def test_a_host_without_a_certificate_of_the_control_plane_sends_nothing(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PLAIN_LINKS, settings.SWITCHYARD_HOME = False, tmp_path
    monkeypatch.setattr(ingress_client, "own_identity", lambda: ingress_client.OwnIdentity(tmp_path / "control"))
    received = await post(NOBODY)
    assert (received.status, received.sent) == (None, False)
    assert "ca.pem is missing" in received.reason
