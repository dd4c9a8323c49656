"""Keeps a node out of new placements, or lets it in again. What already runs on it goes on undisturbed."""

from datetime import datetime

from django.db import transaction

from controlplane.kernel import hints, live
from controlplane.kernel.events import event_record
from controlplane.kernel.refusals import Conflict
from controlplane.kernel.tones import Tone
from fleet.models import Node
from fleet.planning.states import NodeState


def node_cordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Cordon a node. Returns False if it was cordoned already.

    Raises:
        Conflict: the node is retired.
    """
    return _set_cordoned(node_id, True, actor, why, now)


def node_uncordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Let a node be chosen again. Returns False if it was not cordoned.

    Raises:
        Conflict: the node is retired.
    """
    return _set_cordoned(node_id, False, actor, why, now)


@transaction.atomic
def _set_cordoned(node_id: str, cordoned: bool, actor: str, why: str, now: datetime) -> bool:
    node = Node.objects.select_for_update().get(id=node_id)
    verb = "cordoned" if cordoned else "uncordoned"
    if node.state == NodeState.RETIRED:
        raise Conflict(f"node {node.id} is retired; only nodes that are still there can be {verb}")
    if node.cordoned is cordoned:
        return False
    node.cordoned = cordoned
    node.save(update_fields=["cordoned"])
    event_record(
        kind=f"node.{verb}",
        message=f"{node.id} {verb} by {actor}" + (f": {why}" if why else ""),
        tone=Tone.WARN if cordoned else Tone.OK,
        now=now,
        actor=actor,
        region=node.region_id,
        node=node.id,
    )
    live.push("nodes", node.id)
    hints.ring("fleet.reconcile")
    return True
