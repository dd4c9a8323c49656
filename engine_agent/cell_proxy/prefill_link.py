"""Connections of a decode cell's proxy to the proxy of a prefill cell: over TLS with both names checked, as an ingress
connects to cells. It sends nothing by itself."""

import asyncio
import ssl
from typing import cast

from engine_agent.cell_proxy.upstream import EngineConnection, EnginePool
from engine_agent.protocol.identity import BadName, IdentityKind, IdentityName, is_fleet_name
from engine_agent.protocol.identity_files import IdentityFiles, peer_name
from engine_agent.protocol.messages import PrefillCell

IDLE_S = 30.0
"""Less than a proxy keeps a connection without a request."""
CONNECT_LIMIT_S = 2.0
"""With the handshake, within one region. Who takes longer is not asked to read."""


class PrefillLink(EnginePool):
    """The connections to one start of a prefill cell. `identity`: what this proxy shows; None: a plain link."""

    def __init__(self, cell: PrefillCell, identity: IdentityFiles | None) -> None:
        super().__init__(cell.host, cell.port, connect_timeout_s=CONNECT_LIMIT_S, idle_s=IDLE_S, on_lost=lambda: None)
        self.cell = cell
        self._identity = identity

    async def connect(self) -> EngineConnection:
        """See `EnginePool`.

        Raises:
            OSError: besides, whoever is there is not the leader of this cell (ssl.SSLError, ConnectionError).
        """
        if self._identity is None:
            return await super().connect()
        context = self._identity.client_context()
        wanted = IdentityName(_fleet_of(context), IdentityKind.NODE, self.cell.node)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            transport, connection = await loop.create_connection(
                lambda: EngineConnection(self), self.cell.host, self.cell.port, ssl=context, server_hostname=wanted.dns
            )
        try:
            shown = peer_name(cast(ssl.SSLObject, transport.get_extra_info("ssl_object")))
        except BadName as error:
            connection.abort()
            raise ConnectionError(str(error)) from error
        if shown != wanted:
            connection.abort()
            raise ConnectionError(f"{self.cell.host}:{self.cell.port} is {shown}, not {wanted}")
        return connection


def _fleet_of(context: ssl.SSLContext) -> str:
    """The fleet whose authorities are believed: the organization in their names (`kernel.authority`).

    Raises:
        ConnectionError: there is not one.
    """
    found = {
        value
        for authority in context.get_ca_certs()
        for part in cast(tuple[tuple[tuple[str, str], ...], ...], authority["subject"])
        for name, value in part
        if name == "organizationName"
    }
    fleet = found.pop() if len(found) == 1 else ""
    if not is_fleet_name(fleet):
        raise ConnectionError("the bundle of authorities is not of one fleet")
    return fleet
