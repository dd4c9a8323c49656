"""The threads that talk to PostgreSQL for agents, each with a connection that no pool gives and no request can take."""

from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from django.db import DEFAULT_DB_ALIAS, connections

CONNECTION_KEPT_S = 60


class Lane(StrEnum):
    """What has a thread and a connection of its own."""

    REPORTS = "reports"
    """And the lease that says that they are written: one proves the other."""
    ORDERS = "orders"
    HELLOS = "hellos"
    CREDENTIALS = "credentials"
    CERTIFICATES = "certificates"


def _take_own_connection() -> None:
    """The calling thread's connection is its own from here on, and none of the pool that requests share."""
    own = connections[DEFAULT_DB_ALIAS].copy()
    own.settings_dict["OPTIONS"].pop("pool", None)
    own.settings_dict["CONN_MAX_AGE"] = CONNECTION_KEPT_S
    connections[DEFAULT_DB_ALIAS] = own


def lane_thread(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"agents-{lane}", initializer=_take_own_connection)
