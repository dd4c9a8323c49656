"""Marks the desired state of nodes as changed, so that whoever holds their sockets sends it again."""

from collections.abc import Iterable

from django.db.models import F

from fleet.models import Node
from kernel import live


def desired_changed(node_ids: Iterable[str]) -> None:
    """Call in the transaction that changed what these nodes must do."""
    ids = sorted(set(node_ids))
    if ids:
        Node.objects.filter(id__in=ids).update(desired_version=F("desired_version") + 1)
        live.push_desired(ids)
