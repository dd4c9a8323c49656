"""Leases in PostgreSQL, which guarantee progress without a queue. Each is one statement, so races have one winner."""

import os
import socket
import threading
from datetime import datetime, timedelta

from django.db import connection

from kernel.models import Lease

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


def lease_release(*, name: str, holder: str, now: datetime) -> None:
    """Give a lease back early. The row stays, so that its token keeps growing."""
    Lease.objects.filter(name=name, holder=holder).update(expires_at=now)


def lease_held_since(*, name: str, now: datetime) -> datetime | None:
    """Returns since when a lease has been held without a gap, or None if it is free."""
    lease = Lease.objects.filter(name=name, expires_at__gt=now).first()
    return lease.acquired_at if lease else None
