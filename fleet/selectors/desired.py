"""What each node must do, said whole: built from the cells it is a member of, whenever somebody asks."""

from collections import defaultdict
from collections.abc import Iterable

from engine_agent.protocol.messages import Assignment, Desired, Peer
from engine_agent.protocol.states import Phase
from fleet.models import CellMember, Node
from fleet.planning.phases import PHASES
from fleet.planning.states import CellState
from models_registry.planning.engine_arguments import render_engine_plan


def desired_versions(node_ids: Iterable[str]) -> dict[str, int]:
    """The version of each node's desired state, to compare with what it was last sent."""
    return dict(Node.objects.filter(id__in=list(node_ids)).values_list("id", "desired_version"))


def desired_for(node_ids: Iterable[str]) -> dict[str, Desired]:
    """The desired state of these nodes, in three queries."""
    nodes = {node.id: node for node in Node.objects.filter(id__in=list(node_ids))}
    own = {
        member.node_id: member
        for member in CellMember.objects.filter(node_id__in=nodes).select_related(
            "cell__deployment__instance_type", "cell__model_version"
        )
    }
    peers: dict[str, list[Peer]] = defaultdict(list)
    cells = {member.cell_id for member in own.values()}
    for member in CellMember.objects.filter(cell_id__in=cells).select_related("node").order_by("rank"):
        peers[member.cell_id].append(
            Peer(node=member.node_id, rank=member.rank, address=member.node.address, port_base=member.node.port_base)
        )
    return {
        node.id: Desired(
            node=node.id,
            version=node.desired_version,
            assignment=_assignment(own[node.id], tuple(peers[own[node.id].cell_id])) if node.id in own else None,
        )
        for node in nodes.values()
    }


def _assignment(member: CellMember, peers: tuple[Peer, ...]) -> Assignment:
    cell = member.cell
    return Assignment(
        cell=cell.id,
        generation=cell.generation,
        rank=member.rank,
        role=member.role,
        phase=PHASES.get(CellState(cell.state), Phase.STOP),
        plan=render_engine_plan(cell.model_version.spec(), cell.deployment.instance_type.shape()),
        peers=peers,
        secret=cell.secret,
        drain_deadline_s=cell.deployment.drain_deadline_s,
    )
