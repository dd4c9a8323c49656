"""What people may ask of one node beside cordoning it: empty it, or replace it. Each is recorded with who asked, why.

The reconciler does the rest: it drains what still serves as the disruption ledger allows, and swaps the node.
"""

from datetime import datetime

from django.db import transaction

from fleet.models import CellMember, Node
from fleet.planning.states import CellState, NodeState
from fleet.services.cell_actions import cell_drain
from fleet.services.cordon import node_cordon
from fleet.services.replacement import is_replaced, replacement_ask
from kernel import hints, live
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone

REPLACEABLE = frozenset({NodeState.READY, NodeState.SUSPECT})


def node_drain(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Cordon a node and drain the cell that it is in: requests in flight finish or meet the deadline, the cell stops,
    and another one on other nodes makes up for it. The machine stays.

    Raises:
        Conflict: the node is retired, or its cell is starting or changed meanwhile.
    """
    with transaction.atomic():
        node_cordon(node_id=node_id, actor=actor, now=now, why=why)
        member = CellMember.objects.filter(node_id=node_id).select_related("cell").first()
        if member is not None and member.cell.state != CellState.DRAINING:
            cell_drain(cell_id=member.cell_id, actor=actor, now=now, why=why or f"to empty {node_id}")


def node_replace_ask(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Have a node replaced: its cell is drained, another node takes its place, and the machine is ended.

    Raises:
        Conflict: the node is not in use, or is being replaced already.
    """
    with transaction.atomic():
        node = Node.objects.select_for_update().get(id=node_id)
        if NodeState(node.state) not in REPLACEABLE:
            allowed = " or ".join(sorted(REPLACEABLE))
            raise Conflict(f"node {node.id} is {node.state}; only one that is {allowed} can be replaced")
        if is_replaced(node.id):
            raise Conflict(f"node {node.id} is being replaced already")
        node_cordon(node_id=node.id, actor=actor, now=now, why=why)
        cell = CellMember.objects.filter(node=node).values_list("cell_id", flat=True).first() or ""
        reason = f"replacement asked by {actor}" + (f": {why}" if why else "")
        replacement_ask(node=node, cell=cell, actor=actor, reason=reason, now=now)
        event_record(
            kind="node.replacement",
            message=f"{node.id} is to be replaced: {reason}",
            tone=Tone.MOVING,
            now=now,
            actor=actor,
            region=node.region_id,
            node=node.id,
            cell=cell,
        )
        live.push("nodes", node.id)
        hints.ring("fleet.reconcile")
