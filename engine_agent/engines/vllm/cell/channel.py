"""Messages between leader and one follower: the lines of the handshake, and once both have proved themselves messages
that carry a proof each.

A message's code covers direction, position and kind, so none can be forged, repeated, dropped or moved unnoticed. What
`receive` returns may be unpickled. It says nothing about what messages mean.
"""

import hashlib
import hmac
import socket
import struct
from enum import IntEnum
from threading import Lock
from time import monotonic
from typing import NamedTuple

from engine_agent.engines.cell.handshake import MAX_LINE_BYTES, HandshakeFailed

HANDSHAKE_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct("!BI16s")
_POSITION = struct.Struct("!cQB")
_CODE_BYTES = 16


class Kind(IntEnum):
    """What a message is."""

    BEAT = 1
    """I live; a follower adds the number of the last call that it has finished."""
    SETUP = 2
    """Leader: how to build the engine."""
    READY = 3
    """Leader: the engine is up; from now on silence counts."""
    REPLY = 4
    """Follower: what a call returned."""
    FAILED = 5
    """Follower: the exception that ends it, and with it the cell."""
    LEAVING = 6
    """Follower: it is stopping."""
    FAREWELL = 7
    """Leader: the cell ends, and why."""


class ChannelClosed(Exception):
    """The other side is gone, or what came is not from it; the text says which."""


class Message(NamedTuple):
    """One message."""

    kind: Kind
    payload: bytes


class Channel:
    """One connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, key: bytes, *, leads: bool) -> None:
        self._connection = connection
        self._key = key
        self._outward, self._inward = (b"L", b"F") if leads else (b"F", b"L")
        self._sent = self._received = 0
        self._sending = Lock()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other side is gone.
        """
        with self._sending:
            code = self._code(self._outward, self._sent, kind, payload)
            self._sent += 1
            try:
                self._connection.sendall(_HEADER.pack(kind, len(payload), code) + payload)
            except OSError as error:
                raise ChannelClosed(f"its connection broke: {error.strerror or error}") from error

    def receive(self) -> Message:
        """Wait for the next message, for as long as it takes.

        Raises:
            ChannelClosed: the other side is gone, or a message is not its own.
        """
        kind, length, code = _HEADER.unpack(self._read(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"it announces a message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        payload = self._read(length)
        if not hmac.compare_digest(code, self._code(self._inward, self._received, kind, payload)):
            raise ChannelClosed("a message on its connection is not its own, or not in its place")
        self._received += 1
        return Message(Kind(kind), payload)

    def close(self) -> None:
        """Hang up; a thread that waits in `receive` wakes."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()

    def _read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            try:
                part = self._connection.recv(min(length - len(received), 1 << 20))
            except OSError as error:
                raise ChannelClosed(f"its connection broke: {error.strerror or error}") from error
            if not part:
                raise ChannelClosed("its connection closed")
            received += part
        return bytes(received)

    def _code(self, direction: bytes, position: int, kind: int, payload: bytes) -> bytes:
        code = hashlib.blake2b(_POSITION.pack(direction, position, kind), key=self._key, digest_size=_CODE_BYTES)
        code.update(payload)
        return code.digest()


def send_line(connection: socket.socket, line: bytes) -> None:
    """Send a line of the handshake.

    Raises:
        HandshakeFailed: the other side is gone.
    """
    try:
        connection.sendall(line)
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error


def receive_line(connection: socket.socket) -> bytes:
    """Wait for a line of the handshake, and take nothing of what follows it.

    Raises:
        HandshakeFailed: none came within `HANDSHAKE_TIMEOUT_S`, or one that is too long.
    """
    received = bytearray()
    ends_at = monotonic() + HANDSHAKE_TIMEOUT_S
    try:
        while not received.endswith(b"\n"):
            connection.settimeout(max(0.001, ends_at - monotonic()))
            part = connection.recv(1)  # what follows the line belongs to the channel
            if not part:
                raise HandshakeFailed("the handshake broke off")
            if len(received) >= MAX_LINE_BYTES:
                raise HandshakeFailed(f"a line longer than {MAX_LINE_BYTES} bytes")
            received += part
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error
    return bytes(received)
