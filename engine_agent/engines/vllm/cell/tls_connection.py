"""A TLS connection for threads: one reads, one at a time writes, and neither waits for the other.

An OpenSSL connection belongs to one thread at a time, and `ssl.SSLSocket` would be held by the thread that waits for
what comes next. So TLS happens in memory here, under a lock that nobody holds while the network is waited for.
"""

import socket
import ssl
from threading import Lock
from time import monotonic

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
