"""The spares of a pass as trees of network nodes, and a greedy packing of whole cells onto them, or of single spares
next to nodes that stay, with a small total network distance. `local_search` improves the result. `planner` decides who
may use how many spares.

There is a tree per pool, engine and choice of markets. Its first level is the machine's software, because machines with
different software can never be in one cell. All spares have the same depth; unknown levels count as separate places.
Taking or returning spares costs the logarithm of a group's children."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice

from engine_agent.protocol.states import EngineState
from fleet.capacity.planning.pools import ANY, Markets, may_use
from fleet.placement.planning.distance import Path, depth_of, distance, shared_prefix
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import NodeState


class SpareGroup:
    """Spares below one network node, of which `free` are not taken. Only lowest groups have `nodes`. `height`: maximum
    distance between two of its spares, 0 in a lowest group. `path`: the software, then network nodes from the widest.
    """

    __slots__ = ("_order", "_positions", "children", "free", "height", "nodes", "parent", "path", "position")

    def __init__(self, path: Path, height: int, parent: "SpareGroup | None") -> None:
        self.path = path
        self.height = height
        self.parent = parent
        self.children: list[SpareGroup] = []
        self.nodes: list[NodeView] = []
        self.free = 0
        self.position = 0
        self._order: list[tuple[int, int]] = []
        """(free, position) of children with free spares, smallest first."""
        if parent is not None:
            self.position = len(parent.children)
            parent.children.append(self)

    @property
    def domain(self) -> str:
        return self.path[1]

    def fitting(self, at_least: int, without: set[int]) -> "Iterator[SpareGroup]":
        """Children with `at_least` spares, fewest first, except at the positions `without`."""
        for index in range(bisect_left(self._order, (at_least,)), len(self._order)):
            position = self._order[index][1]
            if position not in without:
                yield self.children[position]

    def largest(self, without: set[int]) -> "SpareGroup":
        """The child with the most spares, except at the positions `without`. There must be one."""
        return next(self.children[position] for _, position in reversed(self._order) if position not in without)

    def take(self, count: int) -> None:
        """Counts this many spares of a lowest group as taken, or if negative as returned."""
        child, group = self, self.parent
        child.free -= count
        while group is not None:
            was = (child.free + count, child.position)
            if was[0]:
                del group._order[bisect_left(group._order, was)]
            if child.free:
                insort(group._order, (child.free, child.position))
            group.free -= count
            child, group = group, group.parent


class TopologyTree:
    """The free spares of one pool. `leaves`: its lowest groups, in order. All paths have `height` entries. `depth`, the
    network's, is one less, because the first entry is the software; two spares with the same software are at most
    `depth` apart. In a lowest group the cheapest are taken first."""

    def __init__(self, places: Iterable[tuple[Path, NodeView]], height: int) -> None:
        self.height = height
        self.depth = height - 1
        self.root = SpareGroup((), height, None)
        self.groups: dict[Path, SpareGroup] = {(): self.root}
        self.leaves: list[SpareGroup] = []
        for path, spare in sorted(places, key=lambda place: (place[0], place[1].price_per_hour or 0.0, place[1].id)):
            self._leaf_group(path).nodes.append(spare)
        for leaf in self.leaves:
            leaf.take(-len(leaf.nodes))

    def _leaf_group(self, path: Path) -> SpareGroup:
        if path in self.groups:
            return self.groups[path]
        group = self.root
        for length in range(1, self.height + 1):
            below = self.groups.get(path[:length])
            if below is None:
                below = self.groups[path[:length]] = SpareGroup(path[:length], self.height - length, group)
            group = below
        self.leaves.append(group)
        return group


def path_of(node: NodeView, software: str, depth: int) -> Path:
    """A node's path: its software, then its network nodes, widest first."""
    known = node.topology[:depth]
    return (software, *known) + (f"?{node.id}",) * (depth - len(known))


def height_between(one: SpareGroup, other: SpareGroup) -> int:
    """Network distance between spares of two lowest groups; above the depth if their software differs."""
    return 0 if one is other else len(one.path) - shared_prefix(one.path, other.path)


PoolKey = tuple[str, str]
"""Region, instance type."""


class Spares:
    """Nodes that could start in a cell now: ready, idle, not cordoned, in no cell."""

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
        """All spares of a pool in a stable order, including those taken in this pass."""
        return self._all.get(pool, ())

    def free(self, pool: PoolKey, markets: Markets = ANY) -> tuple[NodeView, ...]:
        """Spares that are neither taken nor held and that these markets allow."""
        return tuple(node for node in self._free.get(pool, {}).values() if may_use(markets, node.markets))

    def is_free(self, node: NodeView) -> bool:
        """Whether it is a spare that is neither taken nor held."""
        return node.id in self._free.get((node.region, node.instance_type), ())

    def count(self, pool: PoolKey, markets: Markets = ANY) -> int:
        return len(self.free(pool, markets)) if markets else len(self._free.get(pool, ()))

    def depth(self, pool: PoolKey) -> int:
        return self._depth.get(pool, 1)

    def tree(self, pool: PoolKey, engine: str, markets: Markets = ANY) -> TopologyTree:
        """Free spares by their software for this engine and their network nodes."""
        key = (pool, engine, markets)
        if key not in self._trees:
            free = self.free(pool, markets)
            self._trees[key] = TopologyTree(((self.path(node, engine), node) for node in free), self.depth(pool) + 1)
        return self._trees[key]

    def path(self, node: NodeView, engine: str) -> Path:
        """A node's path in `tree`, for any node."""
        return path_of(node, self._stack(node, engine), self.depth((node.region, node.instance_type)))

    def _stack(self, node: NodeView, engine: str) -> str:
        """`NodeView.stack`, computed once for equal machines."""
        key = (node.fingerprint, engine)
        if not node.fingerprint:
            return node.stack(engine)
        if key not in self._stacks:
            self._stacks[key] = node.stack(engine)
        return self._stacks[key]

    def remove(self, pool: PoolKey, engine: str, markets: Markets, nodes: Iterable[NodeView]) -> None:
        """Records that these are taken or held. Their own tree is up to date; other trees are rebuilt."""
        for node in nodes:
            del self._free[pool][node.id]
        for key in [key for key in self._trees if key[0] == pool and key[1:] != (engine, markets)]:
            del self._trees[key]


def is_idle(node: NodeView) -> bool:
    """Whether a node could start in a cell now, if it is in none."""
    return (
        node.state is NodeState.READY
        and not node.cordoned
        and node.report.connected
        and node.report.state is EngineState.IDLE
    )


Parts = tuple[tuple[SpareGroup, int], ...]
"""Number of spares per lowest group."""
MAX_FITTING = 4
"""Maximum number of sufficient groups compared before one of them is split."""
CellsByDomain = Counter[tuple[str, str]]
"""(deployment, failure domain) -> number of cells."""


@dataclass(eq=False, slots=True)
class Draft:
    """A planned cell: `count` nodes, no two farther apart than `ceiling`. `parts`: its nodes per lowest group, empty
    without a place; `distance`: their total network distance."""

    cell: str
    deployment: str
    count: int
    ceiling: int
    parts: Counter[SpareGroup] = field(default_factory=Counter)
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Nodes around one lowest group. `leftover`: spares that remain in the groups that this splits."""

    parts: Parts
    distance: int
    leftover: int


def pack(tree: TopologyTree, drafts: Sequence[Draft], load: CellsByDomain, *, large_first: bool = True) -> None:
    """Gives each draft its parts, if there is place, and counts them as taken. The hardest ones come first: tight ones,
    then (with `large_first`) large ones. Equally near places are ranked by the deployment's cells in their failure
    domain, then by the spares remaining in split groups."""
    batches: dict[tuple[int, int], list[Draft]] = defaultdict(list)
    for draft in drafts:
        batches[draft.ceiling, -draft.count if large_first else draft.count].append(draft)
    load = load.copy()
    for _, batch in sorted(batches.items()):
        _pack_alike(tree, batch, load)


def _pack_alike(tree: TopologyTree, batch: list[Draft], load: CellsByDomain) -> None:
    """Cells of one size, each at the nearest remaining place."""
    places = _PlacesOfSize(tree, batch[0].count, batch[0].ceiling)
    for draft in batch:
        best = places.best(draft.deployment, load)
        if best is None:
            return
        choice, domain = best
        draft.distance = choice.distance
        for leaf, count in choice.parts:
            draft.parts[leaf] += count
            leaf.take(count)
        load[draft.deployment, domain] += 1


class _PlacesOfSize:
    """Places for cells of one size, cheapest first per failure domain. Costs only grow while others are taken, so heaps
    may hold stale entries: an entry is recomputed when it comes up, and counts if it is unchanged."""

    def __init__(self, tree: TopologyTree, count: int, ceiling: int) -> None:
        self.tree, self.count, self.ceiling = tree, count, ceiling
        self.heaps: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for index, leaf in enumerate(tree.leaves):
            choice = grow(leaf, count, ceiling)
            if choice:
                self.heaps[leaf.domain].append((choice.distance, choice.leftover, index))
        for heap in self.heaps.values():
            heapify(heap)

    def best(self, deployment: str, load: CellsByDomain) -> tuple[Choice, str] | None:
        """The cheapest place for a cell of this deployment now, and its failure domain."""
        while self.heaps:
            domain = min(self.heaps, key=lambda name: self._domain_rank(name, deployment, load))
            heap = self.heaps[domain]
            distance, leftover, index = heap[0]
            choice = grow(self.tree.leaves[index], self.count, self.ceiling)
            if choice is None:
                heappop(heap)
                if not heap:
                    del self.heaps[domain]
            elif (choice.distance, choice.leftover) == (distance, leftover):
                return choice, domain
            else:
                heapreplace(heap, (choice.distance, choice.leftover, index))
        return None

    def _domain_rank(self, domain: str, deployment: str, load: CellsByDomain) -> tuple[int, int, int, str]:
        distance, leftover, _ = self.heaps[domain][0]
        return distance, load[deployment, domain], leftover, domain


def grow(leaf: SpareGroup, count: int, ceiling: int, skip: int = 0) -> Choice | None:
    """`count` spares around a lowest group: its own, then the nearest others, skipping those nearer than `skip`. None
    if too few are near enough. Skipping single near spares pays if a whole group is slightly farther."""
    got = min(leaf.free, count)
    if not got:
        return None
    parts: Parts = ((leaf, got),)
    total = 0
    child, group = leaf, leaf.parent
    while got < count:
        if group is None or group.height > ceiling:
            return None
        more = min(group.free - child.free, count - got)
        if more and group.height >= skip:
            others, inner = fill(group, more, child)
            total += inner + got * more * group.height
            parts += others
            got += more
        child, group = group, group.parent
    return Choice(parts, total, sum(part.free - taken for part, taken in parts))


def fill(group: SpareGroup, count: int, without: SpareGroup | None = None) -> tuple[Parts, int]:
    """`count` spares of a group, near each other, and their distance. Takes whole children, and splits one of the
    smallest sufficient ones for the rest."""
    if not group.children:
        return ((group, count),), 0
    parts: Parts = ()
    total = got = 0
    used = set() if without is None else {without.position}
    while got < count:
        child, (inner_parts, inner) = _next_child(group, count - got, used)
        more = sum(taken for _, taken in inner_parts)
        total += inner + got * more * group.height
        parts += inner_parts
        got += more
        used.add(child.position)
    return parts, total


def _next_child(group: SpareGroup, count: int, used: set[int]) -> tuple[SpareGroup, tuple[Parts, int]]:
    """Of the smallest sufficient children, the one with the nearest `count` spares; otherwise the largest with all of
    its spares."""
    tried = 1 if group.height == 1 else MAX_FITTING
    fitting = [(child, fill(child, count)) for child in islice(group.fitting(count, used), tried)]
    if fitting:
        return min(fitting, key=lambda filled: filled[1][1])
    child = group.largest(used)
    return child, fill(child, child.free)


def join(tree: TopologyTree, staying: Sequence[Path], count: int, ceiling: int) -> tuple[Parts, int] | None:
    """Takes `count` spares one by one, each the nearest to all nodes of the cell so far, and returns their distance.
    `staying`: paths of the tree. Of equally near spares, uses the smallest group, so that large ones stay whole.
    Returns None and takes none if too few are within `ceiling`."""
    places = list(staying)
    parts: list[SpareGroup] = []
    total = 0
    for _ in range(count):
        nearest = _nearest(tree, places, ceiling)
        if nearest is None:
            for leaf in parts:
                leaf.take(-1)
            return None
        more, leaf = nearest
        leaf.take(1)
        places.append(leaf.path)
        parts.append(leaf)
        total += more
    return tuple((leaf, parts.count(leaf)) for leaf in dict.fromkeys(parts)), total


def _nearest(tree: TopologyTree, places: Sequence[Path], ceiling: int) -> tuple[int, SpareGroup] | None:
    """The lowest group whose spare has the smallest sum of distances to `places`, and that sum."""
    candidates = []
    for leaf in {_near_one(tree, place) for place in places}:
        if leaf is not None:
            apart = [distance(leaf.path, place, tree.height) for place in places]
            if max(apart) <= ceiling:
                candidates.append((sum(apart), leaf.free, leaf.path, leaf))
    if not candidates:
        return None
    total, _, _, leaf = min(candidates, key=lambda candidate: candidate[:3])
    return total, leaf


def _near_one(tree: TopologyTree, place: Path) -> SpareGroup | None:
    """A lowest group with a spare, below the lowest network node of `place` that has any."""
    for length in range(tree.height, -1, -1):
        group = tree.groups.get(place[:length])
        if group is not None and group.free:
            return fill(group, 1)[0][0][0]
    return None
