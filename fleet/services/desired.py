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
    if cell.role != CellRole.MIXED:
        place_pairs_changed(cell.deployment_id, cell.region_id, besides=cell.pk)


def place_pairs_changed(deployment: str, region: str, *, besides: str = "") -> None:
    """Call in the transaction that changed what the orders of a place's prefill and decode cells say of handovers."""
    leaders = CellMember.objects.filter(
        cell__deployment=deployment,
        cell__region=region,
        cell__state__in=[CellState.STARTING.value, CellState.READY.value, CellState.DRAINING.value],
        rank=0,
    )
    apart = leaders.exclude(cell=besides).exclude(cell__role=CellRole.MIXED.value)
    desired_changed(apart.values_list("node_id", flat=True))
