"""Leases in PostgreSQL, which guarantee progress without a queue. Each is one statement, so races have one winner. They
are plain SQL: control loops call them many times a second, and Django compiles each query anew."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from django.db import connection

_TAKE = """
INSERT INTO kernel_lease AS held (name, holder, token, acquired_at, renewed_at, expires_at)
VALUES (%(name)s, %(holder)s, 1, %(now)s, %(now)s, %(until)s)
ON CONFLICT (name) DO UPDATE SET
    holder = EXCLUDED.holder,
    token = held.token + CASE WHEN held.holder = EXCLUDED.holder AND held.expires_at > %(now)s THEN 0 ELSE 1 END,
    acquired_at = CASE WHEN held.holder = EXCLUDED.holder AND held.expires_at > %(now)s
                       THEN held.acquired_at ELSE EXCLUDED.acquired_at END,
    renewed_at = EXCLUDED.renewed_at,
    expires_at = EXCLUDED.expires_at
WHERE held.holder = EXCLUDED.holder OR held.expires_at <= %(now)s
RETURNING token
"""


def this_holder() -> str:
    """Returns a holder name that is unique to the calling thread among all hosts."""
    return f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"


def lease_take(*, name: str, holder: str, ttl_s: float, now: datetime) -> int | None:
    """Take or renew a lease. Returns its fencing token, or None while another holder has it."""
    with connection.cursor() as cursor:
        cursor.execute(_TAKE, {"name": name, "holder": holder, "now": now, "until": now + timedelta(seconds=ttl_s)})
        row = cursor.fetchone()
    return None if row is None else int(row[0])


@contextmanager
def lease_during(*, name: str, ttl_s: float, now: datetime) -> Iterator[bool]:
    """Take a lease for the calling thread and give it back at the end. Yields False while another holder has it."""
    holder = this_holder()
    if lease_take(name=name, holder=holder, ttl_s=ttl_s, now=now) is None:
        yield False
        return
    try:
        yield True
    finally:
        lease_release(name=name, holder=holder, now=now)


def lease_release(*, name: str, holder: str, now: datetime) -> None:
    """Give a lease back early. The row stays, so that its token keeps growing."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE kernel_lease SET expires_at = %s WHERE name = %s AND holder = %s", [now, name, holder])


def lease_held_since(*, name: str, now: datetime) -> datetime | None:
    """Returns since when a lease has been held without a gap, or None if it is free."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT acquired_at FROM kernel_lease WHERE name = %s AND expires_at > %s", [name, now])
        row: tuple[datetime] | None = cursor.fetchone()
    return row[0] if row else None
