"""Orders of a control plane, for tests of the node agent."""

from engine_agent.protocol.messages import Assignment, Desired, EnginePlan, Peer
from engine_agent.protocol.states import MemberRole, Phase

READY_TIMEOUT_S = 60.0


def assignment(
    generation: int = 1,
    phase: Phase = Phase.SERVE,
    rank: int = 0,
    cell: str = "c-1",
    peers: tuple[Peer, ...] = (),
    plan: EnginePlan | None = None,
) -> Assignment:
    """A place in a cell; rank 0 leads."""
    return Assignment(
        cell=cell,
        generation=generation,
        rank=rank,
        role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
        phase=phase,
        plan=plan or EnginePlan("sim", "sim-70b", max_concurrency=8, ready_timeout_s=READY_TIMEOUT_S),
        peers=peers,
        secret=f"secret of {cell} {generation}",
    )


def order(version: int, given: Assignment | None, node: str = "n-1") -> Desired:
    return Desired(node=node, version=version, assignment=given)
