"""Web's listener for agents: TLS with the control plane's own certificate, which it renews in place.

A client may show a certificate and need not: an agent that enrols has none yet. One that is shown must be of the fleet
and not revoked, may have ended, and is in the scope. What strangers cost is bounded: a handshake and the head of the
first request have `FIRST_WORD_S` each, `MOST_WITHOUT_WEBSOCKET` connections have none at once, and one address has so
many at all (`controlplane.agent_door`).
"""

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import uvicorn
from django.conf import settings
from django.db import connections
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from controlplane.agent_door import AgentDoor
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind
from engine_agent.runtime.identity import Identity, renewed_server_context
from fleet.models import IssuedCertificate
from fleet.services.authority import authority_ensure
from fleet.services.certificate import CertificateOrder, certificate_issue
from fleet.services.enrolment import PEER_CERTIFICATE
from kernel import clock

FIRST_WORD_S = 5.0
MOST_WITHOUT_WEBSOCKET = 2_000
"""A quarter of the files that a process may have open, at the least that we run with."""
LOOK_EVERY_S = 2.0
"""At the control plane's certificate and at what was revoked."""

NO_CHECK_TIME = 0x200000
"""OpenSSL's `X509_V_FLAG_NO_CHECK_TIME`, which Python does not name. An agent that was off until after the end of its
certificate comes back with it: its key and its credential prove it, and it gets another certificate."""

log = logging.getLogger(__name__)


class ControlIdentity:
    """This host's key and certificate for the name of the control plane, in the folder `control` of its home."""

    def __init__(self, home: Path) -> None:
        self.identity = Identity(home / "control")
        self._share = random.random()

    def refresh(self, now: datetime) -> None:
        """Renew the certificate if it is due, and take over what counts.

        Raises:
            django.db.DatabaseError: the database does not answer.
            SealedAway: the key of the authority that signs cannot be opened.
            OSError: the home refused a file.
        """
        trust = authority_ensure(now)
        if not self._is_due(now):
            self.identity.store_trust(bundle=trust.bundle, revoked=trust.revoked)
            return
        order = CertificateOrder(
            IdentityKind.CONTROL, CONTROL_ID, self.identity.signing_request(), believed=trust.bundle_digest
        )
        signed = certificate_issue(order, now=now)
        validity = self.identity.store(chain=signed.chain, bundle=signed.trust.bundle, revoked=signed.trust.revoked)
        self._share = random.random()
        log.info("%s has a certificate until %s", validity.name, validity.not_after.isoformat())

    def _is_due(self, now: datetime) -> bool:
        validity = self.identity.validity()
        if validity is None or now >= validity.renew_after(self._share):
            return True
        # Of another database than this, or revoked.
        return not IssuedCertificate.objects.filter(serial=validity.serial, revoked_at__isnull=True).exists()


class AgentHttpProtocol(HttpToolsProtocol):
    """A connection until it is a WebSocket: it must say what it wants in time, each time, and there may not be too
    many. Head and body have `FIRST_WORD_S` each; how long the answer takes is not its matter."""

    without_websocket = 0

    def __init__(self, *, ended: Callable[[], None], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._ended = ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._count(1)
        self._deadline = self.loop.call_later(FIRST_WORD_S, transport.abort)
        if AgentHttpProtocol.without_websocket > MOST_WITHOUT_WEBSOCKET:
            transport.abort()

    def on_message_begin(self) -> None:
        self._wait_for_more()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._wait_for_more()
        encrypted = self.transport.get_extra_info("ssl_object")
        cast(Any, self.scope)[PEER_CERTIFICATE] = encrypted.getpeercert() or None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._deadline.cancel()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._deadline.cancel()
        self._count(-1)
        super().handle_websocket_upgrade()
        self.transport.get_protocol().ended = self._ended  # type: ignore[attr-defined]  # a WebSocketProtocol

    def _wait_for_more(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(FIRST_WORD_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._count(-1)
        self._ended()
        super().connection_lost(exc)

    @staticmethod
    def _count(change: int) -> None:
        AgentHttpProtocol.without_websocket += change


async def listen(
    bound: socket.socket, config: uvicorn.Config, state: ServerState, opened: Callable[[Any], Any]
) -> None:
    """Open the listener once there is a certificate, tell `opened`, and keep the certificate fresh until cancelled."""
    control = ControlIdentity(settings.SWITCHYARD_HOME)
    is_open, problem = False, ""
    while True:
        try:
            try:
                await asyncio.to_thread(_refresh, control)
            finally:
                if not is_open and control.identity.has_certificate:
                    opened(_listener(bound, config, state, control.identity))
                    is_open = True
            problem = ""
        except Exception as error:
            if problem != (problem := f"{type(error).__name__}: {error}"):
                log.error("the control plane's certificate: %s", problem)
        await asyncio.sleep(LOOK_EVERY_S)


def _listener(bound: socket.socket, config: uvicorn.Config, state: ServerState, identity: Identity) -> AgentDoor:
    def connection(ended: Callable[[], None]) -> AgentHttpProtocol:
        return AgentHttpProtocol(ended=ended, config=config, server_state=state, app_state={})

    context = renewed_server_context(identity, client_certificate=ssl.CERT_OPTIONAL)
    # A connection takes over renewed files from the first context, but not what is checked.
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | NO_CHECK_TIME
    door = AgentDoor(bound, context, connection, FIRST_WORD_S)
    door.start(config.backlog)
    return door


def _refresh(control: ControlIdentity) -> None:
    try:
        control.refresh(clock.now())
    finally:
        connections.close_all()
