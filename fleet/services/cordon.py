"""Keeps a node out of new placements, or lets it in again. What already runs on it goes on undisturbed."""

from datetime import datetime

from django.db import transaction

from fleet.models import CellMember, Node, Replacement
from fleet.planning.fault_rules import IncidentKind
from fleet.planning.states import NodeState
from fleet.services.fault_evidence import hardware_faults_settle
from fleet.services.incident import incidents_close
from kernel import hints, live
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone


def node_cordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Cordon a node. Returns False if it was cordoned already.

    Raises:
        Conflict: the node is retired.
    """
    return _set_cordoned(node_id, True, actor, why, now)


def node_uncordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Let a node be chosen again. Returns False if it was not cordoned.

    Whoever does that vouches for the machine: a faulty one that is in no cell is ready again, what its agent saw of its
    hardware is settled, its incidents close, and a replacement that has not begun is called off.

    Raises:
        Conflict: the node is retired, or faulty and still in a cell.
    """
    with transaction.atomic():
        changed = _set_cordoned(node_id, False, actor, why, now)
        if changed:
            _vouch(Node.objects.get(id=node_id), actor, why, now)
    return changed


def _vouch(node: Node, actor: str, why: str, now: datetime) -> None:
    said = f"uncordoned by {actor}" + (f": {why}" if why else "")
    if node.state == NodeState.FAULTY:
        if CellMember.objects.filter(node=node).exists():
            raise Conflict(f"node {node.id} is faulty and still in a cell; wait until its replacement took its place")
        node.state, node.reason, node.state_since, node.spare_since = NodeState.READY.value, said, now, now
        node.save(update_fields=["state", "reason", "state_since", "spare_since"])
    hardware_faults_settle(node_id=node.id, now=now)
    incidents_close(node=node.id, kind__in=list(IncidentKind), resolution=said, now=now)
    Replacement.objects.filter(node=node, closed_at__isnull=True).update(closed_at=now, resolution=said)


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
