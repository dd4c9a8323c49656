"""PostgreSQL with standbys: connects to the host of `DATABASE_URL` that takes writes.

It differs from Django's backend in three ways:

- The host that answered last is tried first, because each new connection would wait for an unreachable host.
- A commit that stopped waiting for the standby fails. PostgreSQL only warns, but the commit is lost if the standby is
  promoted.
- A recently used connection is not tested, which was every fifth query of an idle control plane.
"""

import select
from collections.abc import Mapping
from time import monotonic
from typing import Any, ClassVar, Self

import psycopg
from django.db.backends.postgresql import base
from psycopg.pq import TransactionStatus

from kernel.clock import compare_with

WAITS_FOR_STANDBY = "SyncRepWaitForLSN"
"""PostgreSQL's function that warns; the text depends on the language."""
FRESH_S = 5.0
"""For this long after its last exchange a connection counts as working, unless the server has closed it."""


class PrimaryConnection(psycopg.Connection[Any]):
    """A connection to the host that takes writes."""

    answered: ClassVar[tuple[str, str]] = ("", "")
    """Host and port of the last connection of this process."""
    exchanged_s: float = float("-inf")
    """When the server last answered, on the monotonic clock."""
    _warning: str = ""

    @classmethod
    def connect(cls, conninfo: str = "", **parameters: Any) -> Self:
        """As psycopg, but tries the host first that answered last."""
        connection = super().connect(conninfo, **in_order(parameters, cls.answered))
        cls.answered = connection.info.host, str(connection.info.port)
        connection.add_notice_handler(connection._note_warning)
        return connection

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        """Every exchange with the server uses this method. Raises OperationalError if the commit may be on this server
        only."""
        result = super().wait(gen, *arguments, **named)
        self.exchanged_s = monotonic()
        if self._warning:
            warning, self._warning = self._warning, ""
            raise psycopg.OperationalError(f"not known to be on the standby: {warning}")
        return result

    @property
    def is_fresh(self) -> bool:
        """Whether it worked moments ago and has nothing to read, such as the end of a closed connection."""
        if self.closed or monotonic() - self.exchanged_s > FRESH_S:
            return False
        waiting = select.poll()
        waiting.register(self.fileno(), select.POLLIN)
        return not waiting.poll(0)

    def _note_warning(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.source_function == WAITS_FOR_STANDBY:
            self._warning = diagnostic.message_primary or "its wait was cancelled"


def in_order(parameters: Mapping[str, Any], first: tuple[str, str]) -> dict[str, Any]:
    """Returns libpq's parameters with this host first; unchanged if it is not one of them."""
    hosts, ports = str(parameters.get("host", "")).split(","), str(parameters.get("port", "")).split(",")
    places = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True))
    if len(places) < 2 or first not in places:
        return dict(parameters)
    places.sort(key=lambda place: place != first)
    return {**parameters, "host": ",".join(host for host, _ in places), "port": ",".join(port for _, port in places)}


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's backend with these connections, with or without a pool."""

    def __init__(self, settings_dict: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if pool := settings_dict["OPTIONS"].get("pool"):
            pool["connection_class"] = PrimaryConnection
        super().__init__(settings_dict, *arguments, **named)

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """Returns a connection from the pool or a new one."""
        if self.pool:
            return super().get_new_connection(conn_params)
        self.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return PrimaryConnection.connect(**conn_params)

    def is_usable(self) -> bool:
        """As Django's, without a test of a connection that worked moments ago. Compares the clocks if that is due."""
        is_fresh = isinstance(self.connection, PrimaryConnection) and self.connection.is_fresh
        if not is_fresh and not super().is_usable():
            return False
        if self.connection.info.transaction_status is TransactionStatus.IDLE:
            try:
                compare_with(self.connection)
            except psycopg.Error:
                return False
        return True
