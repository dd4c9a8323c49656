"""Boots the machines of embedded providers again after all of them were stopped, as `make down` does.

Cells whose machines are gone start a new generation on the same nodes, so that state is what it was; machines that
still run are left alone.
"""

import logging
from datetime import datetime

from fleet.models import Cell, Node, Region
from fleet.planning.decisions import StartCell
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import CellState, NodeState
from fleet.providers import embedded_providers
from fleet.providers.base import EmbeddedProvider, ProviderError
from fleet.services.cell import cell_start
from kernel.transitions import StaleDecision

RESUMED = (CellState.STARTING, CellState.READY)

log = logging.getLogger(__name__)


def embedded_fleet_resume(*, now: datetime) -> int:
    """Start again what was stopped. Returns the number of machines booted.

    A machine whose folder is gone stays down; the reconciler then replaces it.
    """
    return sum(_resume(provider, now) for provider in embedded_providers())


def _resume(provider: EmbeddedProvider, now: datetime) -> int:
    regions = Region.objects.filter(provider=provider.name)
    nodes = Node.objects.filter(region__in=regions).exclude(state__in=[NodeState.RETIRED, NodeState.LOST])
    statuses = provider.describe(list(nodes.values_list("id", flat=True)))
    gone = {node for node, status in statuses.items() if status is ProviderStatus.GONE}
    for cell in Cell.objects.filter(state__in=RESUMED, members__node__in=gone).distinct():
        _start_again(cell, now)
    booted = 0
    for node in sorted(gone):
        try:
            provider.restart_agent(node)
            booted += 1
        except ProviderError as error:
            log.warning("%s", error)
    return booted


def _start_again(cell: Cell, now: datetime) -> None:
    nodes = tuple(cell.members.order_by("rank").values_list("node_id", flat=True))
    decision = StartCell(
        cell.id, CellState(cell.state), cell.generation, nodes, "its machines were stopped and boot again"
    )
    try:
        cell_start(decision, now=now)
    except StaleDecision as stale:
        log.info("left as it is: %s", stale)
