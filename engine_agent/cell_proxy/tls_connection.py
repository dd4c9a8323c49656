"""TLS of a listener's connections, over plain transports: towards the network a protocol, towards the HTTP behind it
the transport. It judges nobody: the context checks certificates, and who may stay is for the protocol to say.

The event loop's own TLS does more than we need for each read and write: buffers that are lent and taken back, a queue
of what is to be encrypted, and an exception for each read, by which it learns that there is nothing more. Here the
encrypted bytes that are left say so. Per request that is half of what TLS costs a cell proxy (docs/bench/links.md).
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

LONGEST_RECORD_BYTES: Final = 16 * 1024
"""Of plain text (RFC 8446, section 5.1): a read of that much takes in a whole record."""


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """One connection of a server. `made` makes the protocol behind it once the handshake is over, which has
    `handshake_s` seconds."""

    def __init__(self, context: ssl.SSLContext, made: Callable[[], asyncio.Protocol], handshake_s: float) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._made = made
        self._handshake_s = handshake_s
        self._handshake_limit: asyncio.TimerHandle | None = None
        self._behind: asyncio.Protocol | None = None
        self._paused = self._ended = False

    # --- asyncio.Protocol: from the network ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._handshake_limit = asyncio.get_running_loop().call_later(self._handshake_s, self.abort)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._behind is None and not self._shaken():
            return
        self._read()

    def eof_received(self) -> None:
        """Whether the other said before that it ends makes no difference: bodies say by themselves where they do."""
        if self._behind is not None and not self._ended:
            self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._stop_clock()
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._behind is not None:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        if self._behind is not None:
            self._behind.resume_writing()

    # --- asyncio.Transport: for the protocol behind ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended or not data:
            return
        written = self._tls.write(data)
        if written < len(data):  # a record at a time
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[self._tls.write(rest) :]
        self._wire.write(self._outgoing.read())

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Say that nothing follows; what the other sends is still read."""
        if not self._ended:
            self._say_end()

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._say_end()
            self._wire.close()

    def abort(self) -> None:
        self._ended = True
        self._wire.abort()

    def is_closing(self) -> bool:
        return self._ended or self._wire.is_closing()

    def pause_reading(self) -> None:
        self._paused = True
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._wire.resume_reading()
        if self._incoming.pending:
            asyncio.get_running_loop().call_soon(self._read)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._wire.get_extra_info(name, default)

    # --- TLS ---

    def _shaken(self) -> bool:
        """Go on with the handshake; whether it is over."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError:
            self._ended = True
            self._flush()  # the alert says why
            self._wire.close()
            return False
        self._stop_clock()
        self._flush()
        self._behind = self._made()
        self._behind.connection_made(self)
        return True

    def _read(self) -> None:
        """Hand on what came, a record at a time, unless nothing is wanted for now."""
        while self._incoming.pending and self._behind is not None and not (self._paused or self._ended):
            try:
                data = self._tls.read(LONGEST_RECORD_BYTES)
            except ssl.SSLWantReadError:  # a part of a record, or one that is TLS's own
                break
            except ssl.SSLError:
                self.abort()
                return
            if not data:
                self._behind.eof_received()
                self.close()
                return
            self._behind.data_received(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._wire.write(self._outgoing.read())

    def _say_end(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # the other has not said so yet
            self._tls.unwrap()
        self._flush()

    def _stop_clock(self) -> None:
        if self._handshake_limit is not None:
            self._handshake_limit.cancel()
            self._handshake_limit = None
