"""TLS of the public port, and who may connect: ingresses of the fleet and, to a prefill cell, the proxies of its decode
cells, until their certificates are revoked.

TLS itself checks the chain and the revocation list; `Peers` checks the name, and cuts open connections of revoked
certificates.

The event loop's own TLS does more than needed for each read and write: it lends buffers, queues text to encrypt, and
raises an exception per read to learn that nothing is left. `TlsConnection` sees that in the pending encrypted bytes.
Per request that is half of the cost of TLS in a cell proxy (docs/bench/links.md)."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

from engine_agent.cell_proxy.downstream import ClientConnection
from engine_agent.cell_proxy.log import LineLog
from engine_agent.protocol.identity import (
    REVOKED_SERIALS_FILE,
    TLS_FOLDER,
    BadName,
    IdentityFiles,
    IdentityKind,
    name_of_peer,
)
from engine_agent.protocol.ticks import seconds_to_tick

LONGEST_RECORD_BYTES: Final = 16 * 1024
"""Of plain text (RFC 8446, section 5.1): a read of this size takes a whole record."""


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """One connection of a server: a protocol for the network, and the transport of the protocol that `protocol_factory`
    makes after the handshake, which has `handshake_s` seconds. It evaluates no certificates: the context and the
    protocol do."""

    def __init__(self, context: ssl.SSLContext, made: Callable[[], asyncio.Protocol], handshake_s: float) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._made = made
        self._handshake_s = handshake_s
        self._handshake_limit: asyncio.TimerHandle | None = None
        self._protocol: asyncio.Protocol | None = None
        self._paused = self._ended = False

    # --- asyncio.Protocol: from the network ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._handshake_limit = asyncio.get_running_loop().call_later(self._handshake_s, self.abort)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._protocol is None and not self._finish_handshake():
            return
        self._read()

    def eof_received(self) -> None:
        """A missing close_notify does not matter: bodies state their own end."""
        if self._protocol is not None and not self._ended:
            self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._stop_clock()
        behind, self._protocol = self._protocol, None
        if behind is not None:
            behind.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # --- asyncio.Transport: for the protocol behind ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended or not data:
            return
        written = self._tls.write(data)
        if written < len(data):  # one record per write
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[self._tls.write(rest) :]
        self._wire.write(self._outgoing.read())

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Sends close_notify; input is still read."""
        if not self._ended:
            self._send_close_notify()

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._send_close_notify()
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

    def _finish_handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError:
            self._ended = True
            self._flush()  # sends the alert
            self._wire.close()
            return False
        self._stop_clock()
        self._flush()
        self._protocol = self._made()
        self._protocol.connection_made(self)
        return True

    def _read(self) -> None:
        while self._incoming.pending and self._protocol is not None and not (self._paused or self._ended):
            try:
                data = self._tls.read(LONGEST_RECORD_BYTES)
            except ssl.SSLWantReadError:  # an incomplete record, or one of TLS itself
                break
            except ssl.SSLError:
                self.abort()
                return
            if not data:
                self._protocol.eof_received()
                self.close()
                return
            self._protocol.data_received(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._wire.write(self._outgoing.read())

    def _send_close_notify(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # the other end has not sent close_notify yet
            self._tls.unwrap()
        self._flush()

    def _stop_clock(self) -> None:
        if self._handshake_limit is not None:
            self._handshake_limit.cancel()
            self._handshake_limit = None


HANDSHAKE_S = 5.0
"""A connection with a longer handshake is cut: until then it counts in no limit."""
LOG_EVERY_S = 1.0
"""Refusals in between are not logged: a peer with a certificate of the fleet can retry in a loop."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection: the serial number of its certificate, and the name of the `ingress`, or of the
    `node` that leads the other cell if it is the proxy of one."""

    serial: int
    node: str = ""
    ingress: str = ""


class Peers:
    """Admits connections by the identity in `home`, whose files may change. `decode_nodes` may hand requests over."""

    def __init__(
        self,
        home: Path,
        log: LineLog,
        decode_nodes: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._decode_nodes = decode_nodes
        self._identity = IdentityFiles(home)
        self._revoked_file = home / TLS_FOLDER / REVOKED_SERIALS_FILE
        self._log = log
        self._logged_at_s = float("-inf")

    def context(self) -> ssl.SSLContext:
        """Raises OSError if there is no identity, or a file of it is none of its kind."""
        return self._identity.server_context()

    def admit(self, transport: asyncio.BaseTransport) -> Peer | None:
        """The peer after its handshake; None to refuse it."""
        shown = transport.get_extra_info("ssl_object").getpeercert()
        try:
            name = name_of_peer(shown)
        except BadName as error:
            self._note_refusal(str(error))
            return None
        serial = int(shown["serialNumber"], 16)
        if name.kind is IdentityKind.INGRESS:
            return Peer(serial, ingress=name.id)
        if name.kind is IdentityKind.NODE and name.id in self._decode_nodes():
            return Peer(serial, name.id)
        self._note_refusal(f"{name} is no ingress, and no decode cell of this one")
        return None

    def _note_refusal(self, reason: str) -> None:
        if monotonic() - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = monotonic()
            self._log.event(event="connection_refused", reason=reason)

    async def cut_revoked(self, connections: Iterable[ClientConnection]) -> None:
        """Cuts open connections of revoked certificates, until cancelled."""
        seen = None
        while True:
            await asyncio.sleep(seconds_to_tick(asyncio.get_running_loop().time()))
            stamp = self._identity.stamp()
            if stamp == seen:
                continue
            seen, revoked = stamp, self._revoked()
            for connection in tuple(connections):
                if connection.peer is not None and connection.peer.serial in revoked:
                    self._log.event(event="connection_cut", reason="its certificate was revoked")
                    connection.abort()

    def _revoked(self) -> set[int]:
        try:
            return {int(line, 16) for line in self._revoked_file.read_text(encoding="ascii").split()}
        except (OSError, ValueError) as error:
            self._log.event(event="revocations_unreadable", reason=str(error))
            return set()
