"""Messages arrive whole, in order, and from the other member alone."""

import socket
from collections.abc import Iterator

import pytest

from engine_agent.engines.cell.handshake import MAX_LINE_BYTES, HandshakeFailed
from engine_agent.engines.vllm.cell.channel import Channel, ChannelClosed, Kind, receive_line, send_line

KEY = b"k" * 32


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    leaders, followers = socket.socketpair()
    with leaders, followers:
        yield leaders, followers


Ends = tuple[socket.socket, socket.socket]


def test_messages_of_any_length_arrive_in_order(ends: Ends) -> None:
    leader, follower = Channel(ends[0], KEY, leads=True), Channel(ends[1], KEY, leads=False)
    for payload in (b"", b"x" * 100_000):
        leader.send(Kind.SETUP, payload)
        assert follower.receive() == (Kind.SETUP, payload)
    follower.send(Kind.BEAT, b"1")
    assert leader.receive() == (Kind.BEAT, b"1")


def test_a_message_under_another_key_is_not_read(ends: Ends) -> None:
    Channel(ends[0], b"other" * 6, leads=True).send(Kind.SETUP, b"pickle")
    with pytest.raises(ChannelClosed, match="not its own"):
        Channel(ends[1], KEY, leads=False).receive()


def test_a_message_cannot_be_repeated(ends: Ends) -> None:
    sent, repeated = socket.socketpair()
    with sent, repeated:
        Channel(sent, KEY, leads=True).send(Kind.READY)
        once = repeated.recv(1024)
    ends[0].sendall(once + once)
    receiving = Channel(ends[1], KEY, leads=False)
    assert receiving.receive().kind is Kind.READY
    with pytest.raises(ChannelClosed, match="not in its place"):
        receiving.receive()


def test_a_message_cannot_be_turned_back_on_its_sender(ends: Ends) -> None:
    Channel(ends[0], KEY, leads=True).send(Kind.BEAT)
    with pytest.raises(ChannelClosed, match="not its own"):
        Channel(ends[1], KEY, leads=True).receive()


def test_no_length_is_believed(ends: Ends) -> None:
    ends[0].sendall(b"\x02" + b"\xff" * 4 + b"0" * 16)
    with pytest.raises(ChannelClosed, match="announces a message of 4294967295 bytes"):
        Channel(ends[1], KEY, leads=False).receive()


def test_the_end_of_the_connection_is_named(ends: Ends) -> None:
    ends[0].close()
    receiving = Channel(ends[1], KEY, leads=False)
    with pytest.raises(ChannelClosed, match="closed"):
        receiving.receive()
    with pytest.raises(ChannelClosed, match="broke"):
        receiving.send(Kind.BEAT)


def test_a_line_of_the_handshake_takes_nothing_of_what_follows_it(ends: Ends) -> None:
    send_line(ends[0], b"the last line\n")
    Channel(ends[0], KEY, leads=True).send(Kind.READY)
    assert receive_line(ends[1]) == b"the last line\n"
    assert Channel(ends[1], KEY, leads=False).receive().kind is Kind.READY


def test_a_line_without_end_is_given_up(ends: Ends) -> None:
    ends[0].sendall(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(HandshakeFailed, match=f"a line longer than {MAX_LINE_BYTES} bytes"):
        receive_line(ends[1])


def test_a_handshake_that_breaks_off_is_named(ends: Ends) -> None:
    ends[0].sendall(b"half a li")
    ends[0].close()
    with pytest.raises(HandshakeFailed, match="the handshake broke off"):
        receive_line(ends[1])
    with pytest.raises(HandshakeFailed, match="the handshake broke off"):
        send_line(ends[1], b"x" * 100_000)
