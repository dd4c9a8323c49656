"""Requests the last lines of nodes' logs while a user reads them, and keeps what their agents send.

A request is part of a node's desired state and expires by itself: a lost message or a user who left costs nothing.
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
from kernel.sanitize import json_without_nul

REQUEST_TTL = timedelta(seconds=60)
RENEW_BEFORE = timedelta(seconds=25)
"""A page asks again every few seconds; the request is written, and sent to the agent, only this often."""
KEPT_FOR = timedelta(hours=1)
_REQUEST = """
WITH due AS (
    INSERT INTO fleet_nodelog AS known (node_id, wished_until, cell, generation, logs)
    SELECT id, %(until)s, '', 0, '{}' FROM fleet_node WHERE id = ANY(%(nodes)s) ORDER BY id
    ON CONFLICT (node_id) DO UPDATE SET wished_until = EXCLUDED.wished_until WHERE known.wished_until <= %(renew)s
    RETURNING node_id
)
UPDATE fleet_node SET desired_version = desired_version + 1 WHERE id IN (SELECT node_id FROM due) RETURNING id
"""


def node_logs_request(*, nodes: Iterable[str], now: datetime) -> None:
    """A user reads the logs of these nodes now. One statement, whether or not anything is to be renewed."""
    values: dict[str, Any] = {"nodes": sorted(set(nodes)), "until": now + REQUEST_TTL, "renew": now + RENEW_BEFORE}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_REQUEST, values)
            due = [str(node) for (node,) in cursor.fetchall()]
        if due:
            live.push_desired(due)


def node_logs_store(*, tails: Mapping[str, LogTail], now: datetime) -> None:
    """Keep the lines that agents sent; those of a node whose logs nobody reads are dropped."""
    with transaction.atomic():
        for node, tail in sorted(tails.items()):
            logs = json.loads(json_without_nul(msgspec.json.encode(tail.logs)))
            changes = {"said_at": now, "cell": (tail.cell or "")[:160], "generation": tail.generation, "logs": logs}
            if NodeLog.objects.filter(node=node, wished_until__gt=now - REQUEST_TTL).update(**changes):
                live.push("logs", node)


def node_logs_trim(*, now: datetime) -> None:
    """Forget lines that nobody has read for a while."""
    NodeLog.objects.filter(wished_until__lt=now - KEPT_FOR).delete()
