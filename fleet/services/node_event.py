"""What every change of a node by a service tells: its event, and the hint by which pages fetch it anew."""

from datetime import datetime

from fleet.models import CellMember, Node
from fleet.planning.states import NODE_TONE, NodeState
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone


def cell_of(node: str) -> str:
    """The cell that a node is in; "" for none."""
    return CellMember.objects.filter(node_id=node).values_list("cell_id", flat=True).first() or ""


def node_event(
    node: Node, kind: str, message: str, *, now: datetime, tone: Tone | None = None, actor: str = "switchyard"
) -> None:
    """Record it, with the node's cell, in the transaction of the change. `tone`: by default that of its state."""
    event_record(
        kind=kind,
        message=message,
        tone=tone or NODE_TONE[NodeState(node.state)],
        now=now,
        actor=actor,
        region=node.region_id,
        node=node.id,
        cell=cell_of(node.id),
    )
    live.push("nodes", node.id)
