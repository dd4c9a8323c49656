"""Decides how long the reconciler may rest after a pass without decisions. Almost everything that it reacts to is a
change of a row, which wakes it. Only time itself does not: silence that lasts, or a deadline."""

from datetime import datetime

from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState

REST_S = 5.0
"""Also the delay of decisions that depend on minutes or hours, such as the end of a surplus spare or a slot of the day
plan. Below `kernel.control_standing.LATE_AFTER_S`, and far below the 15 s within which every step resumes (I8)."""


def rest_s(fleet: FleetView, now: datetime) -> float:
    """Seconds until the next pass if nothing wakes the reconciler. 0 while a second may matter: a node or cell is in
    doubt or on its way, a machine is about to end, a rollout runs, or some web processes are behind.

    While no web process keeps up, as when all agents connect again, silence does not count. The limits of silence are
    longer than the rest, so the first pass after that is in time for them."""
    faults = fleet.faults
    if fleet.rollouts or fleet.notices or faults.replacements or faults.down:
        return 0.0
    if not all(cell.state is CellState.READY for cell in fleet.cells.values()):
        return 0.0
    nodes = [node for node in fleet.nodes.values() if node.state is not NodeState.RETIRED or node.ordered is not None]
    if not all(map(_is_in_order, nodes)):
        return 0.0
    if fleet.listening_since is None:
        return REST_S
    keeping_up = {name for name, one in fleet.listeners.by_id.items() if one.until > now and one.since is not None}
    return REST_S if all(_is_heard(node, keeping_up) for node in nodes) else 0.0


def _is_in_order(node: NodeView) -> bool:
    return node.ordered is None and node.state is NodeState.READY and node.report.unhealthy_since is None


def _is_heard(node: NodeView, keeping_up: set[str]) -> bool:
    report = node.report
    return report.connected and not report.quiet and report.listener in keeping_up
