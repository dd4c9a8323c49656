"""TLS over a plain transport: what comes in pieces is put together, what is not wanted for now waits, and whoever does
not finish a handshake, or breaks it, is cut."""

import asyncio
import ssl
from typing import cast

import pytest
import pytest_asyncio

from engine_agent.cell_proxy.tls_connection import LONGEST_RECORD_BYTES, TlsConnection
from engine_agent.protocol.identity import IdentityFiles, IdentityKind
from tests.engine_agent.tls import fleet_of_rigs, identity_of

pytestmark = pytest.mark.asyncio

NODE = "n-0a1b2c3d"
LONG = bytes(range(256)) * 800  # 13 records


class Wire(asyncio.Transport):
    """The network below: what the server sends waits here."""

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
        node = IdentityFiles(identity_of(IdentityKind.NODE, NODE).folder.parent)
        self.server = TlsConnection(node.server_context(), lambda: self.behind, handshake_s)
        self.server.connection_made(self.wire)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = fleet_of_rigs().name(IdentityKind.NODE, NODE).dns
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
        """Both ways, to the server in pieces of this length."""
        said = self._outgoing.read()
        for at in range(0, len(said), piece_bytes):
            self.server.data_received(said[at : at + piece_bytes])
        self.fetch()

    def fetch(self) -> None:
        """What the server has sent, to the client."""
        self._incoming.write(bytes(self.wire.sent))
        self.wire.sent.clear()

    def say(self, data: bytes, piece_bytes: int = 1 << 30) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.client.write(rest) :]
        self.carry(piece_bytes)

    def heard(self) -> bytes:
        """By the client, up to now; it ends where the server said that nothing follows."""
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


async def test_both_sides_understand_each_other_and_know_who_they_are(link: Link) -> None:
    link.say(b"question")
    link.server.write(b"answer")
    assert (link.behind.pieces, link.heard()) == ([b"question"], b"answer")
    shown = link.server.get_extra_info("ssl_object").getpeercert()
    assert "i-1" in str(shown["subjectAltName"])
    assert link.server.get_extra_info("peername") == ("127.0.0.1", 1)


@pytest.mark.parametrize("piece_bytes", [1, 1000, 5, 1 << 30])
async def test_what_comes_in_any_pieces_is_what_was_said(link: Link, piece_bytes: int) -> None:
    said = LONG if piece_bytes > 100 else LONG[:3000]
    link.say(said, piece_bytes)
    assert b"".join(link.behind.pieces) == said
    assert max(map(len, link.behind.pieces)) <= LONGEST_RECORD_BYTES


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_read() -> None:
    link = Link()
    with pytest.raises(ssl.SSLWantReadError):
        link.client.do_handshake()
    link.carry()
    link.client.do_handshake()
    link.say(b"at once")
    assert link.behind.pieces == [b"at once"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_an_answer_of_any_length_leaves_whole(link: Link, kind: type) -> None:
    link.server.write(kind(LONG))
    assert link.heard() == LONG


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


async def test_what_waits_is_not_handed_on_once_reading_is_paused_again() -> None:
    link = Link(Behind(pause_after=1))
    link.shake()
    link.say(LONG)
    link.server.resume_reading()
    link.server.pause_reading()
    await asyncio.sleep(0)
    assert len(link.behind.pieces) == 1


async def test_half_of_it_can_end_and_the_other_go_on(link: Link) -> None:
    link.server.write(b"the last word")
    link.server.write_eof()
    assert link.heard() == b"the last word<end>"
    link.say(b"and yet")
    assert (link.behind.pieces, link.wire.closed) == ([b"and yet"], False)


async def test_closing_says_so_after_what_was_written(link: Link) -> None:
    link.server.write(b"the last word")
    link.server.close()
    link.server.write(b"too late")
    assert (link.heard(), link.wire.closed, link.server.is_closing()) == (b"the last word<end>", True, True)
    link.say(b"nobody reads this")
    assert link.behind.pieces == []


async def test_a_client_that_says_that_it_ends_is_closed(link: Link) -> None:
    with pytest.raises(ssl.SSLWantReadError):
        link.client.unwrap()
    link.carry()
    assert (link.behind.events, link.wire.closed) == (["made", "eof"], True)


async def test_a_client_that_hangs_up_without_a_word_is_told_on(link: Link) -> None:
    link.server.eof_received()
    link.server.connection_lost(None)
    assert link.behind.events == ["made", "eof", "lost"]


async def test_bytes_that_the_client_never_encrypted_break_the_connection(link: Link) -> None:
    link.server.data_received(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert (link.behind.pieces, link.wire.aborted) == ([], True)


async def test_back_pressure_reaches_whoever_writes(link: Link) -> None:
    link.server.pause_writing()
    link.server.resume_writing()
    assert link.behind.events == ["made", "stalled", "goes on"]


@pytest.mark.parametrize("said", [b"GET /healthz HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05" + bytes(5)])
async def test_what_is_no_handshake_is_closed_and_served_nothing(said: bytes) -> None:
    link = Link()
    link.server.data_received(said)
    link.server.data_received(said)
    assert (link.wire.closed, link.behind.events) == (True, [])
    link.server.connection_lost(None)
    assert link.behind.events == []


async def test_whoever_does_not_finish_a_handshake_is_cut() -> None:
    link = Link(handshake_s=0.0)
    link.server.data_received(b"\x16")
    async with asyncio.timeout(60):
        await link.wire.was_aborted.wait()
    assert link.behind.events == []


async def test_the_limit_of_handshakes_is_over_with_them() -> None:
    slow, quick = Link(handshake_s=0.0), Link(handshake_s=0.0)
    quick.shake()
    async with asyncio.timeout(60):
        await slow.wire.was_aborted.wait()
    assert not quick.wire.aborted
