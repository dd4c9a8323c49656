"""Remembers what was done to nodes that did not work, so that one that needs it too often gets a person's attention."""

from datetime import datetime

from fleet.models import Repair


def repair_record(*, node: str, what: str, reason: str, now: datetime) -> None:
    """Call in the transaction of the repair itself. `what`: a word such as `replacement`, `agent_restart`, `reload`."""
    Repair.objects.create(node_id=node, what=what, reason=reason, at=now)
