"""Messages between leader and one follower: the lines of the handshake, then framed messages, all inside one TLS
connection that the handshake is bound to.

So no other process can read, forge, repeat, drop or reorder messages, and results of `receive` may be unpickled. An
OpenSSL connection belongs to one thread at a time, and `ssl.SSLSocket` would stay locked while a thread waits for data.
So TLS runs in memory here, under a lock that no thread holds while it waits for the network: one thread reads and
another writes."""

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
"""Encrypted at a time; a message may be a thousand times as long."""


class TlsConnection:
    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, leads: bool, limit_s: float) -> None:
        """Performs the TLS handshake. Until `lift_limit`, `limit_s` applies to everything that is read and to each
        write. Raises OSError if the other side is gone, is too slow (`TimeoutError`) or speaks no TLS
        (`ssl.SSLError`)."""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=leads)
        self._held = Lock()
        self._ends_at_s: float | None = monotonic() + limit_s
        try:
            while not self._is_established():
                self._receive()
        finally:
            connection.sendall(self._outgoing.read())  # after a failure, the alert

    @property
    def peer_certificate(self) -> bytes | None:
        """The other side's certificate as DER; only a leader presents one."""
        return self._tls.getpeercert(binary_form=True)

    def lift_limit(self) -> None:
        """Removes the time limit, and sends small messages without delay."""
        self._ends_at_s = None
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit_writes(self, limit_s: float) -> None:
        """Aborts later writes that take longer; used after the last read."""
        self._connection.settimeout(limit_s)

    def read(self, limit: int) -> bytes:
        """Returns up to `limit` bytes as soon as there are any; none if the other side closed or is gone. Raises
        OSError if the connection broke, the data is not the other side's (`ssl.SSLError`), or `limit_s` is over."""
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
        """Sends all of it. Raises OSError if the other side is gone, or receives nothing for `limit_s`."""
        for at in range(0, len(message), _WRITTEN_BYTES):
            with self._held:
                self._tls.write(message[at : at + _WRITTEN_BYTES])
                encrypted = self._outgoing.read()
            self._connection.sendall(encrypted)

    def close(self) -> None:
        """Closes the connection; a thread that waits in `read` wakes."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()

    def _is_established(self) -> bool:
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
"""For another thread's send to finish, and for the message to be sent."""
MAX_MESSAGE_BYTES = 1 << 30
_HEADER = struct.Struct("!BI")


class Kind(IntEnum):
    BEAT = 1
    """A heartbeat; a follower adds the number of the last call that it has finished."""
    SETUP = 2
    """Leader: how to build the engine."""
    READY = 3
    """Leader: the engine is up; from now on silence counts."""
    REPLY = 4
    """Follower: the result of a call."""
    FAILED = 5
    """Follower: the exception that ends it, and with it the cell."""
    LEAVING = 6
    FAREWELL = 7
    """Leader: the cell ends, and why."""
    CALL = 8
    """Leader: its number, and what every worker does now."""


class ChannelClosed(Exception):
    """The other side is gone, or a message is malformed; the text states which."""


class Message(NamedTuple):
    kind: Kind
    payload: bytes


class Channel:
    """One connection. Any thread may send; one receives."""

    def __init__(self, connection: TlsConnection) -> None:
        self._connection = connection
        self._sending = Lock()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        with self._sending:
            self._write(kind, payload)

    def beat(self, payload: bytes = b"") -> None:
        """Sends a heartbeat, unless another message is being sent: that message serves as one, and may wait for a
        member that receives nothing. Raises ChannelClosed if the other side is gone."""
        if self._sending.acquire(blocking=False):
            try:
                self._write(Kind.BEAT, payload)
            finally:
                self._sending.release()

    def send_last(self, kind: Kind, payload: bytes) -> None:
        """Sends one message if the other side receives it soon: it may be the member that hangs. Raises ChannelClosed
        if the other side is gone, or receives nothing."""
        if self._sending.acquire(timeout=LAST_MESSAGE_S):
            try:
                self._write(kind, payload, LAST_MESSAGE_S)
            finally:
                self._sending.release()

    def receive(self) -> Message:
        """Waits for the next message without a limit. Raises ChannelClosed if the other side is gone, or a message is
        malformed."""
        kind, length = _HEADER.unpack(self._read(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"it announces a message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        try:
            return Message(Kind(kind), self._read(length))
        except ValueError as error:
            raise ChannelClosed(f"it sent a message of unknown kind {kind}") from error

    def close(self) -> None:
        """Closes the connection; a thread that waits in `receive` wakes."""
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
                raise ChannelClosed("data on its connection is not authentic") from error
            except OSError as error:
                raise ChannelClosed(f"its connection broke: {error.strerror or error}") from error
            if not part:
                raise ChannelClosed("its connection closed")
            received += part
        return bytes(received)


def secure(connection: socket.socket, context: ssl.SSLContext, *, leads: bool) -> TlsConnection:
    """Returns the TLS connection on a new socket, which has `HANDSHAKE_TIMEOUT_S` including the lines of the handshake.
    Raises HandshakeFailed if the other side is gone, is too slow, or speaks no TLS 1.3."""
    try:
        return TlsConnection(connection, context, leads=leads, limit_s=HANDSHAKE_TIMEOUT_S)
    except ssl.SSLEOFError as error:
        raise HandshakeFailed("the handshake broke off") from error
    except ssl.SSLError as error:
        raise HandshakeFailed(without_tls(error)) from error
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error


def send_line(connection: TlsConnection, line: bytes) -> None:
    """Sends a line of the handshake. Raises HandshakeFailed if the other side is gone."""
    try:
        connection.write(line)
    except OSError as error:
        raise HandshakeFailed(f"the handshake broke off: {error}") from error


def receive_line(connection: TlsConnection) -> bytes:
    """Waits for a line of the handshake, and reads nothing that follows it. Raises HandshakeFailed if no line arrived
    in time, or it is too long."""
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
