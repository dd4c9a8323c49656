"""Finds the spares nearest to the nodes that stay in a cell."""

from collections.abc import Sequence

from fleet.planning.placement.distance import Path, distance
from fleet.planning.placement.packing import Parts, fill
from fleet.planning.placement.spare_tree import Group, SpareTree


def join(tree: SpareTree, staying: Sequence[Path], count: int, ceiling: int) -> tuple[Parts, int] | None:
    """Take `count` spares, one by one, each the nearest to all that are in the cell by then; and their distance to it.

    `staying` are paths of the tree. Of equally near spares, one of the smallest group, so that large ones
    stay whole. None, and nothing taken, if there are too few no farther than `ceiling` from any of the cell.
    """
    places = list(staying)
    parts: list[Group] = []
    total = 0
    for _ in range(count):
        found = _nearest(tree, places, ceiling)
        if found is None:
            for leaf in parts:
                leaf.take(-1)
            return None
        more, leaf = found
        leaf.take(1)
        places.append(leaf.path)
        parts.append(leaf)
        total += more
    return tuple((leaf, parts.count(leaf)) for leaf in dict.fromkeys(parts)), total


def _nearest(tree: SpareTree, places: Sequence[Path], ceiling: int) -> tuple[int, Group] | None:
    """The lowest group whose spare has the smallest sum of distances to `places`, and that sum."""
    found = []
    for leaf in {_near_one(tree, place) for place in places}:
        if leaf is not None:
            apart = [distance(leaf.path, place, tree.height) for place in places]
            if max(apart) <= ceiling:
                found.append((sum(apart), leaf.free, leaf.path, leaf))
    if not found:
        return None
    total, _, _, leaf = min(found, key=lambda candidate: candidate[:3])
    return total, leaf


def _near_one(tree: SpareTree, place: Path) -> Group | None:
    """A lowest group with a spare, below the lowest network node of `place` that has any."""
    for length in range(tree.height, -1, -1):
        group = tree.groups.get(place[:length])
        if group is not None and group.free:
            return fill(group, 1)[0][0][0]
    return None
