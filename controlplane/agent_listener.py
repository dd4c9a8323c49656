"""Web's listener for agents: TLS with the control plane's own certificate, which it renews in place.

A client may show a certificate and need not: an agent that enrols has none yet. One that is shown must be of the fleet
and not revoked, may have ended, and is in the scope. Unauthenticated connections are bounded: a handshake and the head
of a request have 5 s each, and there are limits of connections without a WebSocket (`controlplane.http_connections`)
and of connections of one network (`controlplane.connection_door`)."""

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
from django.conf import settings
from django.db import connections
from uvicorn.server import ServerState

from controlplane.connection_door import ConnectionDoor, ConnectionLimits
from controlplane.http_connections import HttpConnectionLimit, http_connections
from engine_agent.node.identity import Identity, renewed_server_context
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind
from fleet.agents.models import IssuedCertificate
from fleet.agents.services.authority import CertificateOrder, authority_ensure, certificate_issue
from kernel import clock
from kernel.addresses import is_loopback

HANDSHAKE_S, HEAD_S = 5.0, 5.0
HANDSHAKES_MOST = 500
"""Concurrent handshakes, hellos included, when all agents reconnect: at 100 a second each
still ends within `HANDSHAKE_S`. With more, all would exceed it and restart."""
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
        """Renew the certificate if it is due, and take over what counts. Raises django.db.DatabaseError if the database
        does not answer. Raises SealedAway if the key of the authority that signs cannot be opened. Raises OSError if
        the home refused a file."""
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


async def listen(
    bound: socket.socket,
    config: uvicorn.Config,
    state: ServerState,
    limits: ConnectionLimits,
    opened: Callable[[Any], Any],
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
                    opened(_listener(bound, config, state, limits, control.identity))
                    is_open = True
            problem = ""
        except Exception as error:
            if problem != (problem := f"{type(error).__name__}: {error}"):
                log.error("the control plane's certificate: %s", problem)
        await asyncio.sleep(LOOK_EVERY_S)


def _listener(
    bound: socket.socket, config: uvicorn.Config, state: ServerState, limits: ConnectionLimits, identity: Identity
) -> ConnectionDoor:
    context = renewed_server_context(identity, client_certificate=ssl.CERT_OPTIONAL)
    # A connection takes over renewed files from the first context, but not what is checked.
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | NO_CHECK_TIME
    make = http_connections(config, state, HttpConnectionLimit(limits.http, HEAD_S))
    limits = replace(limits, handshakes=min(limits.handshakes, HANDSHAKES_MOST))
    door = ConnectionDoor(bound, make, limits, is_unlimited=is_loopback, context=context, handshake_s=HANDSHAKE_S)
    door.start(config.backlog)
    return door


def _refresh(control: ControlIdentity) -> None:
    try:
        control.refresh(clock.now())
    finally:
        connections.close_all()
