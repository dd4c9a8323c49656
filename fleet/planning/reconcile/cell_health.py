"""Decides what state a cell is in, from what the agents of its members report of its current generation."""

from datetime import datetime

from engine_agent.protocol.fingerprint import first_mismatch
from engine_agent.protocol.states import EngineState
from fleet.planning.decisions import Decision, MoveCell
from fleet.planning.fingerprints import member_stacks
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView, NodeView
from fleet.planning.states import DEAD, CellState
from kernel.ages import age_text

RUNNING = frozenset({CellState.STARTING, CellState.READY, CellState.DRAINING})


def plan_health(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of cell states that follow from observation alone."""
    running = (cell for cell in fleet.cells.values() if cell.state in RUNNING)
    return tuple(decision for cell in running if (decision := _judge(cell, fleet, settings, now)) is not None)


def _judge(cell: CellView, fleet: FleetView, settings: FleetSettings, now: datetime) -> Decision | None:
    members = [(member, fleet.nodes[member.node]) for member in cell.members]
    for member, node in members:
        if node.state in DEAD:
            return _move(cell, CellState.LOST, f"rank {member.rank} on {node.id} is {node.state}")
    for member, node in members:
        if node.report.is_about(cell) and node.report.state is EngineState.FAILED:
            return _move(cell, CellState.FAILED, f"rank {member.rank} on {node.id}: {node.report.reason}", node.id)
    if cell.state is CellState.STARTING:
        mismatch = _mismatch(cell, fleet)
        if mismatch:
            return _move(cell, CellState.FAILED, mismatch)
        age_s = fleet.listening_for_s(cell.state_since, now)
        return _judge_start(cell, [node for _, node in members], age_s, fleet, settings)
    if cell.state is CellState.READY:
        return _judge_ready(cell, members[0][1], settings)
    return None


def _mismatch(cell: CellView, fleet: FleetView) -> str:
    """Why the members' software forms no cell (I2); the engines compare again, with flags and weights."""
    engine = fleet.deployments[cell.deployment].of_cell(cell).engine
    software = ((member.rank, member.node, fleet.nodes[member.node].software) for member in cell.members)
    return first_mismatch(member_stacks(engine, software))


def _judge_ready(cell: CellView, leader: NodeView, settings: FleetSettings) -> Decision | None:
    """Unhealthy is what reports say for long enough; how long ago the last one came is a matter of liveness."""
    report = leader.report
    if not report.is_about(cell) or report.unhealthy_since is None or report.last_seen_at is None:
        return None
    unhealthy_s = (report.last_seen_at - report.unhealthy_since).total_seconds()
    if unhealthy_s <= settings.unhealthy_after_s:
        return None
    why = report.health_reason or "no reason given"
    return _move(
        cell, CellState.FAILED, f"rank 0 on {leader.id} unhealthy for {age_text(unhealthy_s)}: {why}", leader.id
    )


def _judge_start(
    cell: CellView, nodes: list[NodeView], age_s: float, fleet: FleetView, settings: FleetSettings
) -> Decision | None:
    if all(node.report.is_about(cell) and node.report.state is EngineState.READY for node in nodes):
        return _move(cell, CellState.READY, f"all {len(nodes)} ranks are ready")
    timeout_s = fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s + settings.start_grace_s
    if age_s > timeout_s:
        waiting = ", ".join(node.id for node in nodes if node.report.state is not EngineState.READY)
        return _move(cell, CellState.FAILED, f"not ready within {timeout_s:.0f} s; waiting for {waiting}")
    return None


def _move(cell: CellView, to: CellState, reason: str, failed_by: str = "") -> MoveCell:
    return MoveCell(cell.id, cell.state, cell.generation, to, reason, failed_by)
