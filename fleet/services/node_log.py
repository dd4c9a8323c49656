"""Asks agents for the last lines of their logs while somebody reads them, and keeps what they show.

A wish is part of a node's desired state and ends by itself: a lost message or a reader who went away costs nothing.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

import msgspec
from django.db import transaction

from controlplane.kernel import live
from controlplane.kernel.storable import storable_json
from engine_agent.protocol.messages import LogTail
from fleet.models import NodeLog
from fleet.services.desired import desired_changed

WISH_FOR = timedelta(seconds=60)
RENEW_BEFORE = timedelta(seconds=25)
"""A reader looks again every few seconds; the wish is written, and told to the agent, only this often."""
KEPT_FOR = timedelta(hours=1)


@transaction.atomic
def node_logs_wish(*, nodes: Iterable[str], now: datetime) -> None:
    """Somebody reads the logs of these nodes now."""
    wanted = sorted(set(nodes))
    lasting = NodeLog.objects.filter(node__in=wanted, wished_until__gt=now + RENEW_BEFORE)
    due = sorted(set(wanted) - set(lasting.values_list("node_id", flat=True)))
    NodeLog.objects.bulk_create(
        [NodeLog(node_id=node, wished_until=now + WISH_FOR) for node in due],
        update_conflicts=True,
        unique_fields=["node"],
        update_fields=["wished_until"],
    )
    desired_changed(due)


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
