"""Decides which spare nodes form or join a cell, for all cells of a pass together, and gives the reason in one
sentence. Requests come in turns (`fleet.quotas.planning.turns`). In a turn, repairs come first and take the spares
nearest to the nodes that stay. New cells share what is not reserved for repairs, packed for a small total network
distance; if it is too little, in the order of the requests. Requests with fewer markets come first, because others have
more choice. A cell without a place holds the spares that it can use, so that later ones cannot starve it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.capacity.planning.pools import ANY, Markets, strictest_first
from fleet.placement.planning import reasons
from fleet.placement.planning.distance import Path, failure_domain
from fleet.placement.planning.local_search import pack_shortest
from fleet.placement.planning.packing import (
    CellsByDomain,
    Draft,
    Parts,
    PoolKey,
    SpareGroup,
    Spares,
    TopologyTree,
    fill,
    join,
)
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import CellState


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A cell that needs `count` more nodes, bought in these `markets`. All of its nodes must share `within` network
    nodes (0: any). `turn`: lower ones first."""

    cell: str
    deployment: str
    region: str
    instance_type: str
    count: int
    staying: tuple[NodeView, ...] = ()
    within: int = 0
    engine: str = ""
    is_repair: bool = False
    markets: Markets = ANY
    turn: tuple[int, int] = (0, 0)

    @property
    def pool(self) -> PoolKey:
        return self.region, self.instance_type

    @property
    def size(self) -> int:
        return self.count + len(self.staying)


@dataclass(frozen=True, slots=True)
class Placed:
    """The cell's nodes in rank order, remaining ones first."""

    nodes: tuple[NodeView, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no place. `short`: missing nodes, below `near` if possible."""

    reason: str
    short: int
    near: Path


PlacementResult = Placed | Refused


class Placement:
    """The placement of one pass. Spares given to or held for one cell are not given to another."""

    def __init__(self, fleet: FleetView) -> None:
        self.spares = Spares(fleet)
        self._kept = {
            (region.name, kind): n for region in fleet.regions.values() for kind, n in region.repair_only.items()
        }
        self._load = _cells_by_domain(fleet)
        self._on_device = _nodes_by_device(fleet)

    def place(self, orders: Sequence[PlacementRequest]) -> dict[str, PlacementResult]:
        """A result for each request, by cell."""
        results: dict[str, PlacementResult] = {}
        for turn in sorted({order.turn for order in orders}):
            results |= self._place_of_turn([order for order in orders if order.turn == turn])
        return results

    def _place_of_turn(self, orders: Sequence[PlacementRequest]) -> dict[str, PlacementResult]:
        repairs = sorted((one for one in orders if one.is_repair), key=lambda one: strictest_first(one.markets))
        results: dict[str, PlacementResult] = {order.cell: self._place_repair(order) for order in repairs}
        growth: dict[tuple[PoolKey, Markets], list[PlacementRequest]] = defaultdict(list)
        for order in orders:
            if not order.is_repair:
                growth[order.pool, order.markets].append(order)
        for alike in sorted(growth, key=lambda alike: strictest_first(alike[1])):
            results |= self._place_new_cells(growth[alike])
        return results

    def _place_repair(self, order: PlacementRequest) -> PlacementResult:
        """Adds the nearest spares. If none may join the nodes that stay, the whole cell moves."""
        if order.staying:
            tree = self._spare_tree(order)
            staying = [self.spares.path(node, order.engine) for node in order.staying]
            nearest = join(tree, staying, order.count, self._ceiling(order))
            if nearest:
                joined = self._hand_out(order, nearest[0])
                reason = reasons.joined(order.staying, joined, tree.depth)
                return Placed((*order.staying, *joined), reason)
        return self._pack_cells([order]).get(order.cell) or self._refuse(
            order, self.spares.count(order.pool, order.markets)
        )

    def _place_new_cells(self, waiting: list[PlacementRequest]) -> dict[str, PlacementResult]:
        """Places as many as there are spares for, in order. A cell without a place holds what it can use."""
        results: dict[str, PlacementResult] = {}
        while waiting:
            pool = waiting[0].pool
            unkept = self.spares.count(pool) - self._kept.get(pool, 0)
            allowed = max(0, min(unkept, self.spares.count(pool, waiting[0].markets)))
            admitted = _first_that_fit(waiting, allowed)
            placed = self._pack_cells(admitted)
            results |= placed
            waiting = [order for order in waiting if order.cell not in placed]
            for order in [order for order in admitted if order.cell not in placed] or waiting[:1]:
                results[order.cell] = self._refuse(order, allowed)
                waiting.remove(order)
        return results

    def _pack_cells(self, orders: Sequence[PlacementRequest]) -> dict[str, PlacementResult]:
        """Places for as many whole cells of one pool and equal markets as possible, grouped by engine."""
        placed: dict[str, PlacementResult] = {}
        for engine in sorted({order.engine for order in orders}):
            alike = [order for order in orders if order.engine == engine]
            drafts = [Draft(order.cell, order.deployment, order.size, self._ceiling(order)) for order in alike]
            tree = self._spare_tree(alike[0])
            pack_shortest(tree, drafts, self._load)
            for order, draft in zip(alike, drafts, strict=True):
                if draft.parts:
                    placed[order.cell] = self._placed(order, draft, tree.depth)
        return placed

    def _placed(self, order: PlacementRequest, draft: Draft, depth: int) -> Placed:
        parts = sorted(draft.parts.items(), key=lambda part: (-part[1], part[0].path))
        nodes = self._hand_out(order, parts)
        domain = (order.deployment, failure_domain(nodes[0].topology))
        reason = reasons.placed(order.deployment, nodes, depth, parts[0][0].free, self._load[domain])
        self._load[domain] += 1
        return Placed(nodes, reason + reasons.cheaper(nodes[: parts[0][1]], parts[0][0].nodes))

    def _hand_out(self, order: PlacementRequest, parts: Iterable[tuple[SpareGroup, int]]) -> tuple[NodeView, ...]:
        """Nodes of places that already count as taken."""
        nodes = []
        for leaf, count in parts:
            if any(node.shared_device for node in leaf.nodes):
                self._spread_over_devices(order.deployment, leaf, count)
            nodes += leaf.nodes[:count]
            del leaf.nodes[:count]
        self.spares.remove(order.pool, order.engine, order.markets, nodes)
        return tuple(nodes)

    def _spread_over_devices(self, deployment: str, leaf: SpareGroup, count: int) -> None:
        """Moves the next `count` nodes of a place to its front: of equally cheap ones, those on devices with the fewest
        nodes of the deployment."""
        for at in range(count):
            best = min(leaf.nodes[at:], key=lambda node: self._device_rank(deployment, node))
            leaf.nodes.remove(best)
            leaf.nodes.insert(at, best)
            if best.shared_device:
                self._on_device[deployment, best.topology, best.shared_device] += 1

    def _device_rank(self, deployment: str, node: NodeView) -> tuple[float, int]:
        others = self._on_device[deployment, node.topology, node.shared_device] if node.shared_device else 0
        return node.price_per_hour or 0.0, others

    def _refuse(self, order: PlacementRequest, allowed: int) -> Refused:
        """Holds the spares of the `allowed` ones that the cell can use, and says what is missing."""
        tree = self._spare_tree(order)
        together, near_enough = _largest(tree, tree.depth), _largest(tree, self._ceiling(order))
        seen = reasons.SpareCounts(
            free=tree.root.free,
            allowed=allowed,
            same_software=together.free if together else 0,
            near_enough=near_enough.free if near_enough else 0,
            other_markets=self.spares.count(order.pool) - tree.root.free,
        )
        reason = reasons.refused(order.instance_type, order.count, order.staying, order.within, tree.depth, seen)
        parts = self._usable_parts(order, tree, allowed)
        held = self._hand_out(order, parts)
        near = order.staying[0].topology if order.staying else (held[0].topology if held else ())
        return Refused(reason, order.count - len(held), near)

    def _usable_parts(self, order: PlacementRequest, tree: TopologyTree, allowed: int) -> Parts:
        """Spares that will be in the cell once others exist. They count as taken."""
        ceiling = self._ceiling(order)
        if order.staying:
            paths = [self.spares.path(node, order.engine) for node in order.staying]
            smaller = (join(tree, paths, count, ceiling) for count in range(order.count - 1, 0, -1))
            return next((joined[0] for joined in smaller if joined), ())
        group = _largest(tree, ceiling)
        count = min(group.free, order.count, allowed) if group else 0
        parts = fill(group, count)[0] if group and count else ()
        for leaf, taken in parts:
            leaf.take(taken)
        return parts

    def _spare_tree(self, order: PlacementRequest) -> TopologyTree:
        return self.spares.tree(order.pool, order.engine, order.markets)

    def _ceiling(self, order: PlacementRequest) -> int:
        depth = self.spares.depth(order.pool)
        return max(0, depth - order.within)


def _first_that_fit(orders: Sequence[PlacementRequest], allowed: int) -> list[PlacementRequest]:
    """The first requests that the spares suffice for. A smaller later one does not overtake."""
    admitted = []
    for order in orders:
        allowed -= order.size
        if allowed < 0:
            break
        admitted.append(order)
    return admitted


def _largest(tree: TopologyTree, height: int) -> SpareGroup | None:
    """The group of this height with the most free spares."""
    groups = (group for group in tree.groups.values() if group.height == height)
    return max(groups, key=lambda group: group.free, default=None)


def _cells_by_domain(fleet: FleetView) -> CellsByDomain:
    """Cells per deployment and failure domain of their first member."""
    load: CellsByDomain = Counter()
    for cell in fleet.cells.values():
        if cell.members and cell.state is not CellState.DRAINING:
            node = fleet.nodes.get(cell.members[0].node)
            load[cell.deployment, failure_domain(node.topology) if node else ""] += 1
    return load


def _nodes_by_device(fleet: FleetView) -> Counter[tuple[str, Path, str]]:
    """Nodes in cells by deployment, machine and the device that they share with other nodes."""
    load: Counter[tuple[str, Path, str]] = Counter()
    for cell in fleet.cells.values():
        for member in cell.members if cell.state is not CellState.DRAINING else ():
            node = fleet.nodes.get(member.node)
            if node and node.shared_device:
                load[cell.deployment, node.topology, node.shared_device] += 1
    return load
