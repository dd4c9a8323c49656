"""Packs whole cells onto spares, and joins spares to the nodes that stay in a cell, so that the total network distance
is small. Greedy; `local_search` improves what is packed.

Pure arithmetic on groups of spares: which deployment a cell is of matters only to spread them. Who may use how many
spares, and how that is explained, is decided in `planner`.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice

from fleet.planning.placement.distance import Path, distance
from fleet.planning.placement.topology_tree import SpareGroup, TopologyTree

Parts = tuple[tuple[SpareGroup, int], ...]
"""How many spares of which lowest groups."""
MAX_FITTING = 4
"""Groups large enough that are compared before one of them is broken."""
CellsByDomain = Counter[tuple[str, str]]
"""How many cells (of a deployment, in a failure domain) there are."""


@dataclass(eq=False, slots=True)
class Draft:
    """A cell on paper: `count` nodes of which no two may be farther apart than `ceiling`, the network's depth or less.

    `parts` says how many nodes of which lowest groups it takes; empty: no place for it. `distance` is their total
    network distance.
    """

    cell: str
    deployment: str
    count: int
    ceiling: int
    parts: Counter[SpareGroup] = field(default_factory=Counter)
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Nodes grown around one lowest group. `leftover` spares stay behind in the groups that this breaks."""

    parts: Parts
    distance: int
    leftover: int


def pack(tree: TopologyTree, drafts: Sequence[Draft], load: CellsByDomain, *, large_first: bool = True) -> None:
    """Give each draft its parts, as far as there is place, and count them as taken.

    Hard ones first: those that must be tight, then (with `large_first`) large ones. Equally near places are told apart
    by how many cells of the deployment their failure domain has, then by how many spares stay behind in the groups
    that are broken.
    """
    batches: dict[tuple[int, int], list[Draft]] = defaultdict(list)
    for draft in drafts:
        batches[draft.ceiling, -draft.count if large_first else draft.count].append(draft)
    load = load.copy()
    for _, batch in sorted(batches.items()):
        _pack_alike(tree, batch, load)


def _pack_alike(tree: TopologyTree, batch: list[Draft], load: CellsByDomain) -> None:
    """Cells of one size, each at the nearest place that is left."""
    places = _Places(tree, batch[0].count, batch[0].ceiling)
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


class _Places:
    """Places for cells of one size, cheapest first in each failure domain.

    What a place costs only grows while others are taken, so heaps with stale entries find the cheapest: an entry is
    computed anew when it comes up, and counts if it is still what it was.
    """

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
            domain = min(self.heaps, key=lambda name: self._rank(name, deployment, load))
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

    def _rank(self, domain: str, deployment: str, load: CellsByDomain) -> tuple[int, int, int, str]:
        distance, leftover, _ = self.heaps[domain][0]
        return distance, load[deployment, domain], leftover, domain


def grow(leaf: SpareGroup, count: int, ceiling: int, skip: int = 0) -> Choice | None:
    """`count` spares around a lowest group: its own, then the nearest others, passing by those nearer than `skip`.

    None if too few are near enough. Passing by near single spares pays where a whole group lies a little farther.
    """
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
    """`count` spares of a group, near each other, and their distance. Takes whole children, and breaks one of the
    smallest that have what is then still missing."""
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
    """The child that gives `count` nearest together, of the smallest that can; else the largest, with all it has."""
    tried = 1 if group.height == 1 else MAX_FITTING
    fitting = [(child, fill(child, count)) for child in islice(group.fitting(count, used), tried)]
    if fitting:
        return min(fitting, key=lambda filled: filled[1][1])
    child = group.largest(used)
    return child, fill(child, child.free)


def join(tree: TopologyTree, staying: Sequence[Path], count: int, ceiling: int) -> tuple[Parts, int] | None:
    """Take `count` spares, one by one, each the nearest to all that are in the cell by then; and their distance to it.

    `staying` are paths of the tree. Of equally near spares, one of the smallest group, so that large ones
    stay whole. None, and nothing taken, if there are too few no farther than `ceiling` from any of the cell.
    """
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
