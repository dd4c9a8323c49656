"""Marks the desired state of nodes as changed, so that whoever holds their sockets sends it again."""

from collections.abc import Iterable

from django.db.models import F

from engine_agent.protocol.states import CellRole
from fleet.models import Cell, CellMember, Node
from fleet.planning.states import CellState
from kernel import live


def desired_changed(node_ids: Iterable[str]) -> None:
    """Call in the transaction that changed what these nodes must do."""
    ids = sorted(set(node_ids))
    if ids:
        Node.objects.filter(id__in=ids).update(desired_version=F("desired_version") + 1)
        live.push_desired(ids)


def pairs_changed(cell: Cell) -> None:
    """Call in the transaction that changed this cell's state: prefill and decode cells of its place name each other in
    their orders, those that serve or are about to."""
    if cell.role == CellRole.MIXED:
        return
    others = CellMember.objects.filter(
        cell__deployment=cell.deployment_id,
        cell__region=cell.region_id,
        cell__state__in=[CellState.STARTING.value, CellState.READY.value, CellState.DRAINING.value],
        rank=0,
    )
    desired_changed(
        others.exclude(cell=cell.pk).exclude(cell__role=CellRole.MIXED.value).values_list("node_id", flat=True)
    )
