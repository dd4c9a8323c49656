"""Marks the desired state of nodes as changed, so that the processes that hold their connections send it again, and
records events about nodes. Call it in the transaction of the change."""

from collections.abc import Iterable
from datetime import datetime

from django.db.models import F

from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell, CellMember
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import NODE_TONE, CellState, NodeState
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone


def desired_changed(node_ids: Iterable[str]) -> None:
    """Call it in the transaction that changed these nodes' orders."""
    ids = sorted(set(node_ids))
    if ids:
        Node.objects.filter(id__in=ids).update(desired_version=F("desired_version") + 1)
        live.push_desired(ids)


def pairs_changed(cell: Cell) -> None:
    """Call it in the transaction that changed this cell's state: the orders of prefill and decode cells of its place
    name each other."""
    if cell.role != CellRole.MIXED:
        place_pairs_changed(cell.deployment_id, cell.region_id, besides=cell.pk)


def place_pairs_changed(deployment: str, region: str, *, besides: str = "") -> None:
    """Call it in the transaction that changed the handover settings of a place's prefill and decode cells."""
    leaders = CellMember.objects.filter(
        cell__deployment=deployment,
        cell__region=region,
        cell__state__in=[CellState.STARTING.value, CellState.READY.value, CellState.DRAINING.value],
        rank=0,
    )
    apart = leaders.exclude(cell=besides).exclude(cell__role=CellRole.MIXED.value)
    desired_changed(apart.values_list("node_id", flat=True))


def cell_of(node: str) -> str:
    """The cell that a node is in, or ""."""
    return CellMember.objects.filter(node_id=node).values_list("cell_id", flat=True).first() or ""


def node_event(
    node: Node, kind: str, message: str, *, now: datetime, tone: Tone | None = None, actor: str = "switchyard"
) -> None:
    """Records an event with the node's cell. Call it in the transaction of the change. `tone`: by default that of the
    node's state."""
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
