"""Spares as the tree of their network nodes, so that near ones are found without looking at all. Decides nothing.

The tree begins with what a machine runs, because machines that differ in it can never be in one cell. Every spare hangs
at the same depth: what is unknown of its topology is a place of its own, because it is not known what shares it.
Taking or giving back spares costs the logarithm of a group's children.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from fleet.planning.placement.distance import Path, shared_prefix
from fleet.planning.snapshot import NodeView


class SpareGroup:
    """The spares below one network node. `free` of them are not taken yet; only lowest groups have `nodes`.

    `height` is how far two spares of this group are from each other at most: 0 in a lowest group. `path` starts with
    what the spares run, then their network nodes from the widest.
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
        """(free, position) of the children that have any, smallest first."""
        if parent is not None:
            self.position = len(parent.children)
            parent.children.append(self)

    @property
    def domain(self) -> str:
        """The failure domain of its spares."""
        return self.path[1]

    def fitting(self, at_least: int, without: set[int]) -> "Iterator[SpareGroup]":
        """Children that have `at_least` so many spares, fewest first; not the ones at the positions `without`."""
        for index in range(bisect_left(self._order, (at_least,)), len(self._order)):
            position = self._order[index][1]
            if position not in without:
                yield self.children[position]

    def largest(self, without: set[int]) -> "SpareGroup":
        """The child with the most spares, not at the positions `without`; there must be one."""
        return next(self.children[position] for _, position in reversed(self._order) if position not in without)

    def take(self, count: int) -> None:
        """Count so many spares of a lowest group as taken; as given back if negative."""
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
    """The free spares of one pool. `leaves` are its lowest groups, in order.

    `places` gives each spare with its path, and all paths have `height` entries. `depth` is that of the network: one
    less, as the first entry is what the spare runs. So two spares are at most `depth` apart if they run the same. Of
    those of one lowest group the cheapest are taken first.
    """

    def __init__(self, places: Iterable[tuple[Path, NodeView]], height: int) -> None:
        self.height = height
        self.depth = height - 1
        self.root = SpareGroup((), height, None)
        self.groups: dict[Path, SpareGroup] = {(): self.root}
        self.leaves: list[SpareGroup] = []
        for path, spare in sorted(places, key=lambda place: (place[0], place[1].price_per_hour or 0.0, place[1].id)):
            self._leaf(path).nodes.append(spare)
        for leaf in self.leaves:
            leaf.take(-len(leaf.nodes))

    def _leaf(self, path: Path) -> SpareGroup:
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
    """A node's path in the tree of a network so deep: what it runs, then its network nodes, widest first."""
    known = node.topology[:depth]
    return (software, *known) + (f"?{node.id}",) * (depth - len(known))


def height_between(one: SpareGroup, other: SpareGroup) -> int:
    """Network distance between a spare of one lowest group and one of another; above the depth if they run other
    software."""
    return 0 if one is other else len(one.path) - shared_prefix(one.path, other.path)
