"""Asks agents for the last lines of their logs while somebody reads them, and keeps what they show.

A wish is part of a node's desired state and ends by itself: a lost message or a reader who went away costs nothing.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction

from engine_agent.protocol.messages import LogTail
from fleet.models import NodeLog
from kernel import live
from kernel.storable import storable_json

WISH_FOR = timedelta(seconds=60)
RENEW_BEFORE = timedelta(seconds=25)
"""A reader looks again every few seconds; the wish is written, and told to the agent, only this often."""
KEPT_FOR = timedelta(hours=1)
_WISH = """
WITH due AS (
    INSERT INTO fleet_nodelog AS known (node_id, wished_until, cell, generation, logs)
    SELECT id, %(until)s, '', 0, '{}' FROM fleet_node WHERE id = ANY(%(nodes)s) ORDER BY id
    ON CONFLICT (node_id) DO UPDATE SET wished_until = EXCLUDED.wished_until WHERE known.wished_until <= %(renew)s
    RETURNING node_id
)
UPDATE fleet_node SET desired_version = desired_version + 1 WHERE id IN (SELECT node_id FROM due) RETURNING id
"""


def node_logs_wish(*, nodes: Iterable[str], now: datetime) -> None:
    """Somebody reads the logs of these nodes now. One statement, whether or not anything is to be renewed."""
    values: dict[str, Any] = {"nodes": sorted(set(nodes)), "until": now + WISH_FOR, "renew": now + RENEW_BEFORE}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_WISH, values)
            due = [str(node) for (node,) in cursor.fetchall()]
        if due:
            live.push_desired(due)


def node_logs_store(*, said: Mapping[str, LogTail], now: datetime) -> None:
    """Keep what agents showed; of a node for whose logs nobody asked, nothing is kept."""
    with transaction.atomic():
        for node, tail in sorted(said.items()):
            logs = json.loads(storable_json(msgspec.json.encode(tail.logs)))
            changes = {"said_at": now, "cell": (tail.cell or "")[:160], "generation": tail.generation, "logs": logs}
            if NodeLog.objects.filter(node=node, wished_until__gt=now - WISH_FOR).update(**changes):
                live.push("logs", node)


def node_logs_trim(*, now: datetime) -> None:
    """Forget lines that nobody has read for a while."""
    NodeLog.objects.filter(wished_until__lt=now - KEPT_FOR).delete()
