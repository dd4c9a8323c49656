"""Who may speak to a cell over TLS: ingresses of its fleet, and to a prefill cell the proxies of its decode cells,
until their certificate is revoked. The chain and the revocation list are checked by TLS itself; who the other is, and
connections that were there before, here."""

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

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

HANDSHAKE_S = 5.0
"""A connection whose handshake takes longer is cut: it counts in no limit until then."""
LOOK_EVERY_S = 1.0
LOG_EVERY_S = 1.0
"""Refusals in between are not logged: each is somebody with a certificate of the fleet, and may come in a loop."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: the serial number of its certificate, and `node`, if it is the proxy of another cell,
    that cell's leader."""

    serial: int
    node: str = ""


class Peers:
    """Judges connections by the identity in `home`, whose files may change. `decode_nodes` may hand requests over."""

    def __init__(
        self,
        home: Path,
        log: LineLog,
        decode_nodes: Callable[[], Collection[str]] = tuple,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._decode_nodes = decode_nodes
        self._identity = IdentityFiles(home)
        self._revoked_file = home / TLS_FOLDER / REVOKED_SERIALS_FILE
        self._log = log
        self._now_s = now_s
        self._logged_at_s = float("-inf")

    def context(self) -> ssl.SSLContext:
        """Raises:
        OSError: there is no identity, or a file of it is none of its kind.
        """
        return self._identity.server_context()

    def admit(self, transport: asyncio.BaseTransport) -> Peer | None:
        """Who this is, whose handshake is over; None: nobody who may be here."""
        shown = transport.get_extra_info("ssl_object").getpeercert()
        try:
            name = name_of_peer(shown)
        except BadName as error:
            self._note_refusal(str(error))
            return None
        serial = int(shown["serialNumber"], 16)
        if name.kind is IdentityKind.INGRESS:
            return Peer(serial)
        if name.kind is IdentityKind.NODE and name.id in self._decode_nodes():
            return Peer(serial, name.id)
        self._note_refusal(f"{name} is no ingress, and no decode cell of this one")
        return None

    def _note_refusal(self, reason: str) -> None:
        if self._now_s() - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = self._now_s()
            self._log.event(event="connection_refused", reason=reason)

    async def cut_revoked(self, connections: Iterable[ClientConnection]) -> None:
        """For ever: break what is open of those who were revoked."""
        seen = None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
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
