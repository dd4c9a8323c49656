"""Messages between leader and one follower: the lines of the handshake, then framed messages, all inside one TLS
connection that the handshake is bound to.

So no other process can read, forge, repeat, drop or reorder messages, and results of `receive` may be unpickled. An
OpenSSL connection belongs to one thread at a time, and `ssl.SSLSocket` would stay locked while a thread waits for data.
So TLS runs in memory here, under a lock that no thread holds while it waits for the network: one thread reads and
another writes.
"""

import socket
import ssl
import struct
from enum import IntEnum
from threading import Lock
from time import monotonic
from typing import NamedTuple

from engine_agent.engines.handshake import MAX_LINE_BYTES, HandshakeFailed, without_tls

_RECEIVED_BYTES = 256 * 1024
_WRITTEN_BYTES = 1 << 20
"""What is encrypted at a time: a message may be a thousand times as long."""


class TlsConnection:
    """One connection, from its TLS handshake on."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, leads: bool, limit_s: float) -> None:
        """Shake hands; `limit_s` holds until `lift_limit`, for all that is read and for each write.

        Raises:
            OSError: the other side is gone, is too slow (`TimeoutError`) or speaks no TLS (`ssl.SSLError`).
        """
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=leads)
        self._held = Lock()
        self._ends_at_s: float | None = monotonic() + limit_s
        try:
            while not self._shaken():
                self._receive()
        finally:
            connection.sendall(self._outgoing.read())  # where it failed, the reason

    @property
    def peer_certificate(self) -> bytes | None:
        """What the other side showed, as DER; only a leader shows one."""
        return self._tls.getpeercert(binary_form=True)

    def lift_limit(self) -> None:
        """From now on wait as long as it takes, and send small messages at once."""
        self._ends_at_s = None
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit_writes(self, limit_s: float) -> None:
        """From now on give up a write that takes longer; what is read last."""
        self._connection.settimeout(limit_s)

    def read(self, limit: int) -> bytes:
        """Up to `limit` bytes, as soon as there are any; none if the other side hung up or is gone.

        Raises:
            OSError: the connection broke, what came is not the other side's (`ssl.SSLError`), or `limit_s` is over.
        """
        while True:
            with self._held:
                try:
                    return self._tls.read(limit)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
            self._receive()

    def write(self, message: bytes) -> None:
        """Send all of it.

        Raises:
            OSError: the other side is gone, or takes nothing for `limit_s`.
        """
        for at in range(0, len(message), _WRITTEN_BYTES):
            with self._held:
                self._tls.write(message[at : at + _WRITTEN_BYTES])
                encrypted = self._outgoing.read()
            self._connection.sendall(encrypted)

    def close(self) -> None:
        """Hang up; a thread that waits in `read` wakes."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()

    def _shaken(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._connection.sendall(self._outgoing.read())
            return False
        return True

    def _receive(self) -> None:
        if self._ends_at_s is not None:
            self._connection.settimeout(max(0.001, self._ends_at_s - monotonic()))
        received = self._connection.recv(_RECEIVED_BYTES)
        with self._held:
            if received:
                self._incoming.write(received)
            else:
                self._incoming.write_eof()


HANDSHAKE_TIMEOUT_S = 5.0
LAST_MESSAGE_S = 0.1
"""For a thread that is sending to be done, and for the message to be taken."""
MAX_MESSAGE_BYTES = 1 << 30
_HEADER = struct.Struct("!BI")


class Kind(IntEnum):
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
    FAREWELL = 7
    """Leader: the cell ends, and why."""
    CALL = 8
    """Leader: its number, and what every worker does now."""


class ChannelClosed(Exception):
    """The other side is gone, or what came is not from it; the text says which."""


class Message(NamedTuple):
    kind: Kind
    payload: bytes


class Channel:
    """One connection. Any thread may send; one receives."""

    def __init__(self, connection: TlsConnection) -> None:
        self._connection = connection
        self._sending = Lock()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send one message, after those that are being sent.

        Raises:
            ChannelClosed: the other side is gone.
            ValueError: it is too long to be received.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        with self._sending:
            self._write(kind, payload)

    def beat(self, payload: bytes = b"") -> None:
        """Send a heartbeat, unless another message is just being sent: that says as much, and may wait for a member
        that takes nothing any more.

        Raises:
            ChannelClosed: the other side is gone.
        """
        if self._sending.acquire(blocking=False):
            try:
                self._write(Kind.BEAT, payload)
            finally:
                self._sending.release()

    def send_last(self, kind: Kind, payload: bytes) -> None:
        """Send one message if the other side takes it soon: it may be what hangs.

        Raises:
            ChannelClosed: the other side is gone, or takes nothing.
        """
        if self._sending.acquire(timeout=LAST_MESSAGE_S):
            try:
                self._write(kind, payload, LAST_MESSAGE_S)
            finally:
                self._sending.release()

    def receive(self) -> Message:
        """Wait for the next message, for as long as it takes.

        Raises:
            ChannelClosed: the other side is gone, or a message is not its own.
        """
        kind, length = _HEADER.unpack(self._read(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"it announces a message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        try:
            return Message(Kind(kind), self._read(length))
        except ValueError as error:
            raise ChannelClosed(f"it sent a message of kind {kind}, which there is not") from error

    def close(self) -> None:
        """Hang up; a thread that waits in `receive` wakes."""
        self._connection.close()

    def _write(self, kind: Kind, payload: bytes, limit_s: float | None = None) -> None:
        try:
            if limit_s is not None:
                self._connection.limit_writes(limit_s)
            self._connection.write(_HEADER.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise ChannelClosed(f"its connection broke: {error.strerror or error}") from error

    def _read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            try:
                part = self._connection.read(min(length - len(received), 1 << 20))
            except ssl.SSLError as error:
                raise ChannelClosed("what came on its connection is not its own") from error
            except OSError as error:
                raise ChannelClosed(f"its connection broke: {error.strerror or error}") from error
            if not part:
                raise ChannelClosed("its connection closed")
            received += part
        return bytes(received)


def secure(connection: socket.socket, context: ssl.SSLContext, *, leads: bool) -> TlsConnection:
    """The TLS connection on a new one, which has `HANDSHAKE_TIMEOUT_S` for the lines of the handshake, too.

    Raises:
        HandshakeFailed: the other side is gone, is too slow, or speaks no TLS 1.3.
    """
    try:
        return TlsConnection(connection, context, leads=leads, limit_s=HANDSHAKE_TIMEOUT_S)
    except ssl.SSLEOFError as error:
        raise HandshakeFailed("the handshake broke off") from error
    except ssl.SSLError as error:
        raise HandshakeFailed(without_tls(error)) from error
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error


def send_line(connection: TlsConnection, line: bytes) -> None:
    """Send a line of the handshake.

    Raises:
        HandshakeFailed: the other side is gone.
    """
    try:
        connection.write(line)
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error


def receive_line(connection: TlsConnection) -> bytes:
    """Wait for a line of the handshake, and take nothing of what follows it.

    Raises:
        HandshakeFailed: none came in time, or one that is too long.
    """
    received = bytearray()
    try:
        while not received.endswith(b"\n"):
            part = connection.read(1)  # what follows the line belongs to the channel
            if not part:
                raise HandshakeFailed("the handshake broke off")
            if len(received) >= MAX_LINE_BYTES:
                raise HandshakeFailed(f"a line longer than {MAX_LINE_BYTES} bytes")
            received += part
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error
    return bytes(received)
