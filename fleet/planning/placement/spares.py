"""The spares of a pass: which nodes are free, which are taken or held for a cell, and what they would run.

A pool is a region and an instance type. Which software must be the same in a cell depends on its engine, and which
spares it may use on the markets of its deployment, so there is a tree of spares for each pool, engine and choice of
markets.
"""

from collections import defaultdict
from collections.abc import Iterable

from engine_agent.protocol.states import EngineState
from fleet.planning.markets import ANY, Markets, may_use
from fleet.planning.placement.distance import Path, depth_of
from fleet.planning.placement.topology_tree import TopologyTree, path_of
from fleet.planning.snapshot import FleetView, NodeView
from fleet.planning.states import NodeState

PoolKey = tuple[str, str]
"""Region, instance type."""


class Spares:
    """Nodes that could start in a cell now: ready, idle, not cordoned, in no cell. `of` a pool does not change."""

    def __init__(self, fleet: FleetView) -> None:
        taken = {member.node for cell in fleet.cells.values() for member in cell.members}
        pools: dict[PoolKey, list[NodeView]] = defaultdict(list)
        topologies: dict[PoolKey, set[tuple[str, ...]]] = defaultdict(set)
        for node in fleet.nodes.values():
            pool = (node.region, node.instance_type)
            topologies[pool].add(node.topology)
            if is_idle(node) and node.id not in taken:
                pools[pool].append(node)
        self._depth = {pool: depth_of(known) for pool, known in topologies.items()}
        self._all = {
            pool: tuple(sorted(nodes, key=lambda node: (node.topology, node.id))) for pool, nodes in pools.items()
        }
        self._free = {pool: {node.id: node for node in nodes} for pool, nodes in self._all.items()}
        self._trees: dict[tuple[PoolKey, str, Markets], TopologyTree] = {}
        self._stacks: dict[tuple[str, str], str] = {}

    def of(self, pool: PoolKey) -> tuple[NodeView, ...]:
        """All spares of a pool in a stable order, whether this pass has taken them or not."""
        return self._all.get(pool, ())

    def free(self, pool: PoolKey, markets: Markets = ANY) -> tuple[NodeView, ...]:
        """Those that no cell has taken and that are held for none, and that a deployment with these markets may use."""
        return tuple(node for node in self._free.get(pool, {}).values() if may_use(markets, node.markets))

    def count(self, pool: PoolKey, markets: Markets = ANY) -> int:
        return len(self.free(pool, markets)) if markets else len(self._free.get(pool, ()))

    def depth(self, pool: PoolKey) -> int:
        return self._depth.get(pool, 1)

    def tree(self, pool: PoolKey, engine: str, markets: Markets = ANY) -> TopologyTree:
        """The free spares by what they would run a cell of this engine with, and by their network nodes."""
        key = (pool, engine, markets)
        if key not in self._trees:
            free = self.free(pool, markets)
            self._trees[key] = TopologyTree(((self.path(node, engine), node) for node in free), self.depth(pool) + 1)
        return self._trees[key]

    def path(self, node: NodeView, engine: str) -> Path:
        """A node's path in `tree`, whether it is a spare or not."""
        return path_of(node, self._stack(node, engine), self.depth((node.region, node.instance_type)))

    def _stack(self, node: NodeView, engine: str) -> str:
        """`NodeView.stack`, computed once for machines that are alike."""
        key = (node.fingerprint, engine)
        if not node.fingerprint:
            return node.stack(engine)
        if key not in self._stacks:
            self._stacks[key] = node.stack(engine)
        return self._stacks[key]

    def remove(self, pool: PoolKey, engine: str, markets: Markets, nodes: Iterable[NodeView]) -> None:
        """These are taken or held. The tree that they are from knows it already; other ones are built anew."""
        for node in nodes:
            del self._free[pool][node.id]
        for key in [key for key in self._trees if key[0] == pool and key[1:] != (engine, markets)]:
            del self._trees[key]


def is_idle(node: NodeView) -> bool:
    """Whether a node could start in a cell now if it is in none."""
    return (
        node.state is NodeState.READY
        and not node.cordoned
        and node.report.connected
        and node.report.state is EngineState.IDLE
    )
