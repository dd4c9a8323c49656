"""Web processes state that they receive agents' reports. Planners count a node's silence by it."""

from datetime import datetime, timedelta

from django.db import connection, transaction

from fleet.models import AgentListener
from fleet.selectors.snapshot import LISTENING_LEASE
from kernel.leases import lease_take

LISTENING_TTL_S = 5.0
FORGOTTEN_AFTER = timedelta(hours=1)
"""After its end: no silence is explained by it any more."""
# One that was not renewed in time, such as a process that was stopped, begins anew.
_RENEW = """
INSERT INTO fleet_agentlistener AS known (id, since, until) VALUES (%(id)s, %(since)s, %(until)s)
ON CONFLICT (id) DO UPDATE SET
    since = CASE WHEN EXCLUDED.since IS NULL THEN NULL
                 WHEN known.until > %(now)s THEN COALESCE(known.since, EXCLUDED.since)
                 ELSE EXCLUDED.since END,
    until = EXCLUDED.until
RETURNING xmax = 0
"""


def listener_renew(*, listener: str, keeps_up: bool, now: datetime) -> None:
    """State that this web process runs, and whether it keeps up with its agents. Some process must, or nobody listens:
    one lease of all of them says so."""
    since = now if keeps_up else None
    until = now + timedelta(seconds=LISTENING_TTL_S)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_RENEW, {"id": listener, "since": since, "until": until, "now": now})
        (is_new,) = cursor.fetchone()
        if is_new:
            AgentListener.objects.filter(until__lt=now - FORGOTTEN_AFTER).delete()
        if keeps_up:
            lease_take(name=LISTENING_LEASE, holder="web", ttl_s=LISTENING_TTL_S, now=now)
