"""Messages arrive whole, in order, unread, and from the other member alone."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from engine_agent.engines.handshake import MAX_LINE_BYTES, HandshakeFailed, binding_of, follower_context
from engine_agent.engines.vllm.cell import channel
from engine_agent.engines.vllm.cell.channel import (
    Channel,
    ChannelClosed,
    Kind,
    TlsConnection,
    receive_line,
    secure,
    send_line,
)
from tests.engine_agent.engines.vllm.cell.members import CERTIFICATE, LIMIT_S


class Ends:
    """The two ends of one TLS connection, and the sockets below them."""

    def __init__(self, leaders: socket.socket, followers: socket.socket) -> None:
        self.sockets = leaders, followers
        with ThreadPoolExecutor(1) as other:
            leading = other.submit(secure, leaders, CERTIFICATE.context, leads=True)
            self.follower = secure(followers, follower_context(), leads=False)
            self.leader = leading.result()

    def channels(self) -> tuple[Channel, Channel]:
        """The leader's, and the follower's."""
        for end in (self.leader, self.follower):
            end.lift_limit = lambda: None  # type: ignore[method-assign]
        return Channel(self.leader), Channel(self.follower)

    def encrypted(self, sending: TlsConnection, kind: Kind, payload: bytes = b"") -> bytes:
        """What goes over the wire for a message, which does not arrive."""
        taken = _Taken()
        real, sending._connection = sending._connection, taken  # type: ignore[assignment]
        Channel(sending).send(kind, payload)
        sending._connection = real
        return bytes(taken.sent)


class _Taken:
    def __init__(self) -> None:
        self.sent = bytearray()

    def sendall(self, sent: bytes) -> None:
        self.sent += sent


@pytest.fixture
def ends() -> Iterator[Ends]:
    leaders, followers = socket.socketpair()
    with leaders, followers:
        yield Ends(leaders, followers)


def test_messages_of_any_length_arrive_in_order(ends: Ends) -> None:
    leader, follower = ends.channels()
    for payload in (b"", b"x" * 5_000_000):
        sending = Thread(target=leader.send, args=(Kind.SETUP, payload))
        sending.start()
        assert follower.receive() == (Kind.SETUP, payload)
        sending.join()
    follower.send(Kind.REPLY, b"1")
    assert leader.receive() == (Kind.REPLY, b"1")


def test_both_ends_bind_to_the_leaders_certificate(ends: Ends) -> None:
    assert binding_of(ends.follower.peer_certificate) == CERTIFICATE.binding
    assert ends.leader.peer_certificate is None


def test_nothing_that_passes_can_be_read(ends: Ends) -> None:
    payload = b"what somebody asked a model"
    assert payload not in ends.encrypted(ends.leader, Kind.CALL, payload)


@pytest.mark.parametrize("at", [5, 20, -1], ids=["first byte", "message", "last byte"])
def test_no_bit_of_a_message_can_be_changed(ends: Ends, at: int) -> None:
    sent = bytearray(ends.encrypted(ends.leader, Kind.CALL, b"x" * 100))
    sent[at] ^= 1
    ends.sockets[0].sendall(sent)
    with pytest.raises(ChannelClosed, match="not authentic"):
        ends.channels()[1].receive()


def test_a_message_cannot_be_repeated(ends: Ends) -> None:
    once = ends.encrypted(ends.leader, Kind.READY)
    ends.sockets[0].sendall(once + once)
    receiving = ends.channels()[1]
    assert receiving.receive().kind is Kind.READY
    with pytest.raises(ChannelClosed, match="not authentic"):
        receiving.receive()


def test_a_message_cannot_be_left_out(ends: Ends) -> None:
    ends.encrypted(ends.leader, Kind.CALL, b"1")
    ends.sockets[0].sendall(ends.encrypted(ends.leader, Kind.CALL, b"2"))
    with pytest.raises(ChannelClosed, match="not authentic"):
        ends.channels()[1].receive()


def test_a_message_cannot_be_turned_back_on_its_sender(ends: Ends) -> None:
    ends.sockets[1].sendall(ends.encrypted(ends.leader, Kind.READY))
    with pytest.raises(ChannelClosed, match="not authentic"):
        ends.channels()[0].receive()


def test_no_length_is_believed(ends: Ends) -> None:
    ends.leader.write(b"\x02" + b"\xff" * 4)
    with pytest.raises(ChannelClosed, match="announces a message of 4294967295 bytes"):
        ends.channels()[1].receive()


def test_a_message_that_is_too_long_is_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 3)
    with pytest.raises(ValueError, match="a message of 4 bytes exceeds the limit of 3"):
        ends.channels()[0].send(Kind.CALL, b"1234")


def test_a_kind_that_there_is_not_is_named(ends: Ends) -> None:
    ends.leader.write(b"\x63" + b"\0" * 4)
    with pytest.raises(ChannelClosed, match="a message of unknown kind 99"):
        ends.channels()[1].receive()


def test_who_waits_for_a_message_keeps_nobody_from_sending(ends: Ends) -> None:
    leader, follower = ends.channels()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.receive) for each in (leader, follower)]
        while not all(each.running() for each in waiting):
            pass
        leader.send(Kind.CALL, b"1")
        assert waiting[1].result(LIMIT_S) == (Kind.CALL, b"1")
        follower.send(Kind.REPLY, b"2")
        assert waiting[0].result(LIMIT_S) == (Kind.REPLY, b"2")


def test_a_beat_does_not_wait_for_a_message_that_is_being_sent(ends: Ends) -> None:
    leader, follower = ends.channels()
    with leader._sending:
        leader.beat()
    leader.beat(b"2")
    assert follower.receive() == (Kind.BEAT, b"2")


def test_the_last_message_waits_for_nobody(ends: Ends) -> None:
    leader, follower = ends.channels()
    with leader._sending:
        leader.send_last(Kind.FAREWELL, b"late")
    leader.send_last(Kind.FAREWELL, b"the end")
    assert follower.receive() == (Kind.FAREWELL, b"the end")
    with pytest.raises(ChannelClosed, match="timed out"):
        leader.send_last(Kind.FAREWELL, b"x" * 50_000_000)


def test_the_end_of_the_connection_is_named(ends: Ends) -> None:
    ends.sockets[0].close()
    receiving = ends.channels()[1]
    with pytest.raises(ChannelClosed, match="closed"):
        receiving.receive()
    with pytest.raises(ChannelClosed, match="broke"):
        receiving.send(Kind.BEAT)


def test_a_line_of_the_handshake_takes_nothing_of_what_follows_it(ends: Ends) -> None:
    send_line(ends.leader, b"the last line\n")
    leader, follower = ends.channels()
    leader.send(Kind.READY)
    assert receive_line(ends.follower) == b"the last line\n"
    assert follower.receive().kind is Kind.READY


def test_a_line_without_end_is_given_up(ends: Ends) -> None:
    ends.leader.write(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(HandshakeFailed, match=f"a line longer than {MAX_LINE_BYTES} bytes"):
        receive_line(ends.follower)


def test_a_handshake_that_breaks_off_is_named(ends: Ends) -> None:
    ends.leader.write(b"half a li")
    ends.sockets[0].close()
    with pytest.raises(HandshakeFailed, match="the handshake broke off"):
        receive_line(ends.follower)
    with pytest.raises(HandshakeFailed, match="the handshake broke off"):
        send_line(ends.follower, b"x" * 100_000)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02"], ids=["nothing", "half a record"])
def test_a_handshake_that_is_too_slow_is_given_up(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(HandshakeFailed, match="the handshake broke off: timed out"):
            secure(ours, CERTIFICATE.context, leads=True)


def test_lines_have_what_tls_left_of_the_time(ends: Ends) -> None:
    ends.follower._ends_at_s = 0.0  # all of it went
    with pytest.raises(HandshakeFailed, match="the handshake broke off: timed out"):
        receive_line(ends.follower)
