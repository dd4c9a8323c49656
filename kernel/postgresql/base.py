"""PostgreSQL with standbys: of the hosts that `DATABASE_URL` names, the one that takes writes.

Three things differ from Django's own backend. A host that is off the network answers nobody, and so each new connection
would first wait for it: the host that answered last is asked first. And a commit that gave up its wait for the standby
is no success: PostgreSQL only warns, though what it committed is lost if the standby is promoted. And a connection that
was used a moment ago is not asked whether it works: of all that an idle control plane asked, every fifth was that.
"""

import select
from collections.abc import Mapping
from time import monotonic
from typing import Any, ClassVar, Self

import psycopg
from django.db.backends.postgresql import base

WAITS_FOR_STANDBY = "SyncRepWaitForLSN"
"""The function of PostgreSQL that warns; its text differs by language."""
FRESH_S = 5.0
"""So long after its last exchange a connection is believed to work, unless its server has hung up."""


class PrimaryConnection(psycopg.Connection[Any]):
    """A connection to the host that takes writes."""

    answered: ClassVar[tuple[str, str]] = ("", "")
    """Host and port of the last connection of this process."""
    exchanged_s: float = float("-inf")
    """When the server last answered, on the monotonic clock."""
    _warning: str = ""

    @classmethod
    def connect(cls, conninfo: str = "", **parameters: Any) -> Self:
        """As psycopg does it, the host first that answered last."""
        connection = super().connect(conninfo, **in_order(parameters, cls.answered))
        cls.answered = connection.info.host, str(connection.info.port)
        connection.add_notice_handler(connection._note_warning)
        return connection

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        """Every exchange with the server passes here.

        Raises:
            OperationalError: what was committed may be on this server only.
        """
        result = super().wait(gen, *arguments, **named)
        self.exchanged_s = monotonic()
        if self._warning:
            warning, self._warning = self._warning, ""
            raise psycopg.OperationalError(f"not known to be on the standby: {warning}")
        return result

    @property
    def is_fresh(self) -> bool:
        """Whether it worked a moment ago and has nothing to read, as the end of a server that went away would be."""
        if self.closed or monotonic() - self.exchanged_s > FRESH_S:
            return False
        waiting = select.poll()
        waiting.register(self.fileno(), select.POLLIN)
        return not waiting.poll(0)

    def _note_warning(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.source_function == WAITS_FOR_STANDBY:
            self._warning = diagnostic.message_primary or "its wait was cancelled"


def in_order(parameters: Mapping[str, Any], first: tuple[str, str]) -> dict[str, Any]:
    """libpq's parameters with one of several hosts in front; unchanged if it is none of them."""
    hosts, ports = str(parameters.get("host", "")).split(","), str(parameters.get("port", "")).split(",")
    places = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True))
    if len(places) < 2 or first not in places:
        return dict(parameters)
    places.sort(key=lambda place: place != first)
    return {**parameters, "host": ",".join(host for host, _ in places), "port": ",".join(port for _, port in places)}


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's, with connections of ours, alone or in a pool."""

    def __init__(self, settings_dict: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if pool := settings_dict["OPTIONS"].get("pool"):
            pool["connection_class"] = PrimaryConnection
        super().__init__(settings_dict, *arguments, **named)

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """One from the pool or, without one, a new one."""
        if self.pool:
            return super().get_new_connection(conn_params)
        self.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return PrimaryConnection.connect(**conn_params)

    def is_usable(self) -> bool:
        """As Django's, without asking a connection that worked a moment ago."""
        return (isinstance(self.connection, PrimaryConnection) and self.connection.is_fresh) or super().is_usable()
