"""What a member of a cell is told to run, as the services say it from the same rows."""

from engine_agent.protocol.messages import Assignment, EnginePlan, Peer
from engine_agent.protocol.states import MemberRole, Phase
from fleet.planning.reconcile.phases import PHASES
from fleet.planning.snapshot import CellView, DeploymentView


def assignment_of(cell: CellView, spec: DeploymentView, node: str) -> Assignment:
    """The order of one of the cell's nodes."""
    rank = next(member.rank for member in cell.members if member.node == node)
    timeout_s = spec.of(cell.version).ready_timeout_s
    return Assignment(
        cell=cell.id,
        generation=cell.generation,
        rank=rank,
        role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
        phase=PHASES.get(cell.state, Phase.STOP),
        plan=EnginePlan(spec.engine, cell.version, max_concurrency=8, ready_timeout_s=timeout_s),
        peers=tuple(Peer(node=member.node, rank=member.rank, address="", port_base=0) for member in cell.members),
        secret=f"{cell.id}/{cell.generation}",
        drain_deadline_s=spec.drain_deadline_s,
    )
