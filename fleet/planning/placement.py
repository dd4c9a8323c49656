"""Decides which spare nodes form a cell, or join one. Nearness is the length of the common network-topology prefix."""

from collections import defaultdict
from collections.abc import Sequence

from engine_agent.protocol.states import EngineState
from fleet.planning.snapshot import FleetView, NodeView
from fleet.planning.states import NodeState


def available_spares(fleet: FleetView, region: str, instance_type: str) -> list[NodeView]:
    """Nodes that could start in a cell now, in a stable order: ready, idle, not cordoned, in no cell."""
    taken = {member.node for cell in fleet.cells.values() for member in cell.members}
    return sorted(
        (
            node
            for node in fleet.nodes.values()
            if node.region == region
            and node.instance_type == instance_type
            and node.state is NodeState.READY
            and not node.cordoned
            and node.id not in taken
            and node.report.connected
            and node.report.state is EngineState.IDLE
        ),
        key=lambda node: (node.topology, node.id),
    )


def shared_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of network nodes, counted from the widest, that two topologies have in common."""
    for depth, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return depth
    return min(len(one), len(other))


def choose_together(spares: Sequence[NodeView], count: int) -> tuple[NodeView, ...] | None:
    """The `count` spares with the longest common prefix; of equal groups the smallest, so that large ones stay whole.

    None if there are fewer spares than that.
    """
    if count > len(spares):
        return None
    groups: dict[tuple[str, ...], list[NodeView]] = defaultdict(list)
    for node in spares:
        for depth in range(len(node.topology) + 1):
            groups[node.topology[:depth]].append(node)
    fitting = [(prefix, nodes) for prefix, nodes in groups.items() if len(nodes) >= count]
    _, nodes = min(fitting, key=lambda group: (-len(group[0]), len(group[1]), group[0]))
    return tuple(nodes[:count])


def choose_joining(spares: Sequence[NodeView], staying: Sequence[NodeView], count: int) -> tuple[NodeView, ...] | None:
    """The `count` spares nearest to the nodes that stay in the cell. None if there are fewer spares than that."""
    if not staying:
        return choose_together(spares, count)
    if count > len(spares):
        return None

    def nearness(node: NodeView) -> int:
        return min(shared_prefix(node.topology, other.topology) for other in staying)

    return tuple(sorted(spares, key=lambda node: (-nearness(node), node.topology, node.id))[:count])
