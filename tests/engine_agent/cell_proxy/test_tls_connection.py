"""TLS over a plain transport: records in pieces, paused reading, and cut connections after an incomplete or broken
handshake."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from engine_agent.cell_proxy.tls_connection import LONGEST_RECORD_BYTES, TlsConnection
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import REVOKED_SERIALS_FILE, IdentityFiles, IdentityKind
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Engine, Script, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until
from tests.engine_agent.tls import fleet_of_rigs, identity_of

NODE_ID = "n-0a1b2c3d"
LONG = bytes(range(256)) * 800  # 13 records


class Wire(asyncio.Transport):
    """The network: keeps the bytes that the server sends."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.sent = bytearray()
        self.closed = self.aborted = False
        self.was_aborted = asyncio.Event()
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True
        self.was_aborted.set()

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Behind(asyncio.Protocol):
    def __init__(self, pause_after: int = 1 << 30) -> None:
        self.pieces: list[bytes] = []
        self.events: list[str] = []
        self._pause_after = pause_after

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        if len(self.pieces) == self._pause_after:
            self.transport.pause_reading()

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")

    def pause_writing(self) -> None:
        self.events.append("stalled")

    def resume_writing(self) -> None:
        self.events.append("goes on")


class Link:
    """A server's connection, and a client in memory."""

    def __init__(self, behind: Behind | None = None, handshake_s: float = 60.0) -> None:
        self.behind = behind or Behind()
        self.wire = Wire()
        node = IdentityFiles(identity_of(IdentityKind.NODE, NODE_ID).folder.parent)
        self.server = TlsConnection(node.server_context(), lambda: self.behind, handshake_s)
        self.server.connection_made(self.wire)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = fleet_of_rigs().name(IdentityKind.NODE, NODE_ID).dns
        context = identity_of(IdentityKind.INGRESS, "i-1").client_context()
        self.client = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def shake(self) -> None:
        for _ in range(4):
            try:
                self.client.do_handshake()
            except ssl.SSLWantReadError:
                self.carry()
                continue
            self.carry()
            return
        raise AssertionError("no handshake came about")

    def carry(self, piece_bytes: int = 1 << 30) -> None:
        """Carries bytes both ways, to the server in pieces of this length."""
        said = self._outgoing.read()
        for at in range(0, len(said), piece_bytes):
            self.server.data_received(said[at : at + piece_bytes])
        self.fetch()

    def fetch(self) -> None:
        """Carries the server's bytes to the client."""
        self._incoming.write(bytes(self.wire.sent))
        self.wire.sent.clear()

    def say(self, data: bytes, piece_bytes: int = 1 << 30) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.client.write(rest) :]
        self.carry(piece_bytes)

    def heard(self) -> bytes:
        """The text that the client has received, up to close_notify."""
        self.fetch()
        whole = b""
        while True:
            try:
                data = self.client.read(1 << 20)
            except ssl.SSLWantReadError:
                return whole
            if not data:
                return whole + b"<end>"
            whole += data


@pytest_asyncio.fixture
async def link() -> Link:
    made = Link()
    made.shake()
    return made


@pytest.mark.asyncio
async def test_both_sides_understand_each_other_and_know_who_they_are(link: Link) -> None:
    link.say(b"question")
    link.server.write(b"answer")
    assert (link.behind.pieces, link.heard()) == ([b"question"], b"answer")
    shown = link.server.get_extra_info("ssl_object").getpeercert()
    assert "i-1" in str(shown["subjectAltName"])
    assert link.server.get_extra_info("peername") == ("127.0.0.1", 1)


@pytest.mark.parametrize("piece_bytes", [1, 1000, 5, 1 << 30])
@pytest.mark.asyncio
async def test_what_comes_in_any_pieces_is_what_was_said(link: Link, piece_bytes: int) -> None:
    said = LONG if piece_bytes > 100 else LONG[:3000]
    link.say(said, piece_bytes)
    assert b"".join(link.behind.pieces) == said
    assert max(map(len, link.behind.pieces)) <= LONGEST_RECORD_BYTES


@pytest.mark.asyncio
async def test_a_request_that_comes_with_the_end_of_the_handshake_is_read() -> None:
    link = Link()
    with pytest.raises(ssl.SSLWantReadError):
        link.client.do_handshake()
    link.carry()
    link.client.do_handshake()
    link.say(b"at once")
    assert link.behind.pieces == [b"at once"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.asyncio
async def test_an_answer_of_any_length_leaves_whole(link: Link, kind: type) -> None:
    link.server.write(kind(LONG))
    assert link.heard() == LONG


@pytest.mark.asyncio
async def test_what_is_not_wanted_for_now_waits_and_comes_in_order() -> None:
    link = Link(Behind(pause_after=2))
    link.shake()
    link.say(LONG)
    assert (len(link.behind.pieces), link.wire.reads) == (2, False)
    link.server.resume_reading()
    assert link.wire.reads
    assert len(link.behind.pieces) == 2, "nobody is called back within a call of theirs"
    await asyncio.sleep(0)
    assert b"".join(link.behind.pieces) == LONG


@pytest.mark.asyncio
async def test_what_waits_is_not_handed_on_once_reading_is_paused_again() -> None:
    link = Link(Behind(pause_after=1))
    link.shake()
    link.say(LONG)
    link.server.resume_reading()
    link.server.pause_reading()
    await asyncio.sleep(0)
    assert len(link.behind.pieces) == 1


@pytest.mark.asyncio
async def test_half_of_it_can_end_and_the_other_go_on(link: Link) -> None:
    link.server.write(b"the last word")
    link.server.write_eof()
    assert link.heard() == b"the last word<end>"
    link.say(b"and yet")
    assert (link.behind.pieces, link.wire.closed) == ([b"and yet"], False)


@pytest.mark.asyncio
async def test_closing_says_so_after_what_was_written(link: Link) -> None:
    link.server.write(b"the last word")
    link.server.close()
    link.server.write(b"too late")
    assert (link.heard(), link.wire.closed, link.server.is_closing()) == (b"the last word<end>", True, True)
    link.say(b"nobody reads this")
    assert link.behind.pieces == []


@pytest.mark.asyncio
async def test_a_client_that_says_that_it_ends_is_closed(link: Link) -> None:
    with pytest.raises(ssl.SSLWantReadError):
        link.client.unwrap()
    link.carry()
    assert (link.behind.events, link.wire.closed) == (["made", "eof"], True)


@pytest.mark.asyncio
async def test_a_client_that_hangs_up_without_a_word_is_told_on(link: Link) -> None:
    link.server.eof_received()
    link.server.connection_lost(None)
    assert link.behind.events == ["made", "eof", "lost"]


@pytest.mark.asyncio
async def test_bytes_that_the_client_never_encrypted_break_the_connection(link: Link) -> None:
    link.server.data_received(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert (link.behind.pieces, link.wire.aborted) == ([], True)


@pytest.mark.asyncio
async def test_back_pressure_reaches_whoever_writes(link: Link) -> None:
    link.server.pause_writing()
    link.server.resume_writing()
    assert link.behind.events == ["made", "stalled", "goes on"]


@pytest.mark.parametrize("said", [b"GET /healthz HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05" + bytes(5)])
@pytest.mark.asyncio
async def test_what_is_no_handshake_is_closed_and_served_nothing(said: bytes) -> None:
    link = Link()
    link.server.data_received(said)
    link.server.data_received(said)
    assert (link.wire.closed, link.behind.events) == (True, [])
    link.server.connection_lost(None)
    assert link.behind.events == []


@pytest.mark.asyncio
async def test_whoever_does_not_finish_a_handshake_is_cut() -> None:
    link = Link(handshake_s=0.0)
    link.server.data_received(b"\x16")
    async with asyncio.timeout(60):
        await link.wire.was_aborted.wait()
    assert link.behind.events == []


@pytest.mark.asyncio
async def test_the_limit_of_handshakes_is_over_with_them() -> None:
    slow, quick = Link(handshake_s=0.0), Link(handshake_s=0.0)
    quick.shake()
    async with asyncio.timeout(60):
        await slow.wire.was_aborted.wait()
    assert not quick.wire.aborted


NODE, INGRESS = IdentityKind.NODE, IdentityKind.INGRESS
ASKED = request("/v1/completions", b"{}", x_switchyard_server="c-test-g3")


class Cell:
    """A proxy with a certificate of a fleet."""

    def __init__(self, fleet: FleetOfTests, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.node = fleet.certify(folder / "node", NODE, "n-0a1b2c3d")
        self.proxy: ProxyProcess

    @contextlib.asynccontextmanager
    async def running(self, engine: Engine) -> AsyncIterator["Cell"]:
        async with running_proxy(engine, "--identity", str(self.folder / "node")) as self.proxy:
            yield self

    def identity(self, kind: IdentityKind, subject: str) -> Identity:
        return self.fleet.certify(self.folder / f"{kind}-{subject}", kind, subject)

    async def open(self, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = self.fleet.name(NODE, "n-0a1b2c3d").dns
        return await asyncio.open_connection("127.0.0.1", self.proxy.port, ssl=context, server_hostname=name)

    async def ask(self, identity: Identity, raw: bytes = ASKED) -> Message:
        reader, writer = await self.open(identity.client_context())
        try:
            writer.write(raw)
            return await read_message(reader)
        finally:
            writer.transport.abort()


async def is_refused(cell: Cell, context: ssl.SSLContext) -> bool:
    """Whether a connection is closed without an answer."""
    try:
        reader, writer = await cell.open(context)
    except (ssl.SSLError, ConnectionError):
        return True
    try:
        writer.write(ASKED)
        return not await reader.read(1)
    except (ssl.SSLError, ConnectionError):
        return True
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.processes
@pytest.mark.asyncio
async def test_only_ingresses_of_the_fleet_are_served(authority: FleetOfTests, tmp_path: Path) -> None:
    stranger = FleetOfTests().certify(tmp_path / "stranger", INGRESS, "i-1")
    stranger.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    nobody = Identity(tmp_path / "nobody")
    nobody.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    async with running_engine() as engine, Cell(authority, tmp_path).running(engine) as cell:
        assert (await cell.ask(cell.identity(INGRESS, "i-1"))).status == 200
        for other in (stranger, nobody, cell.identity(NODE, "n-2"), cell.identity(IdentityKind.CONTROL, "control")):
            assert await is_refused(cell, other.client_context())
        reader, writer = await asyncio.open_connection("127.0.0.1", cell.proxy.port)
        writer.write(ASKED)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"HTTP/"), "plain HTTP is no TLS"
        writer.close()
        assert len(engine.requests) == 1
        await until(lambda: bool(cell.proxy.log_lines("connection_refused")), "it says who was refused")


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_renewed_certificate_is_shown_at_once_and_breaks_no_stream(
    authority: FleetOfTests, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    async with running_engine(_held(go_on)) as engine, Cell(authority, tmp_path).running(engine) as cell:
        ingress = cell.identity(INGRESS, "i-1")
        reader, writer = await cell.open(ingress.client_context())
        writer.write(ASKED)
        await read_head(reader)
        assert await read_chunk(reader) == EVENTS[0]
        serial = authority.renew(cell.node, NODE, "n-0a1b2c3d")
        _, other = await cell.open(ingress.client_context())
        shown = other.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        assert int(shown, 16) == int(serial, 16)
        go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        writer.close()
        other.close()


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_revoked_ingress_is_cut_and_another_goes_on(authority: FleetOfTests, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with running_engine(_held(go_on)) as engine, Cell(authority, tmp_path).running(engine) as cell:
        bad, good = cell.identity(INGRESS, "i-1"), cell.identity(INGRESS, "i-2")
        serial = authority.renew(bad, INGRESS, "i-1")
        streams = [await cell.open(each.client_context()) for each in (bad, good)]
        for reader, writer in streams:
            writer.write(ASKED)
            await read_head(reader)
            assert await read_chunk(reader) == EVENTS[0]
        (cell.node.folder / REVOKED_SERIALS_FILE).write_text(f"{int(serial, 16):x}\n")
        authority.revoke(serial, cell.node)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(read_chunk(streams[0][0]), 60)
        assert await is_refused(cell, bad.client_context())
        go_on.set()
        assert await read_chunk(streams[1][0]) == EVENTS[1]
        for _, writer in streams:
            writer.transport.abort()


def _held(go_on: asyncio.Event) -> Script:
    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await go_on.wait()
        await turn.send(chunk(EVENTS[1]) + b"0\r\n\r\n")

    return script
