"""The smallest total network distance of some cells, by trying every way to fill them. Slow and exact."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from fleet.placement.planning.distance import Path, distance

NO_WAY = 10**9


def smallest_distance(topologies: Sequence[Path], sizes: Sequence[int], depth: int) -> int:
    """Over all ways to choose cells of these sizes from machines with these topologies; `NO_WAY` without any. Machines
    below the same lowest network node are equal, so a cell is a count per node, and the minimum cost of later cells
    depends only on the remaining counts."""
    counts = Counter(topologies)
    places = sorted(counts)
    apart = {(i, j): distance(places[i], places[j], depth) for i, j in combinations(range(len(places)), 2)}

    def cost(cell: tuple[int, ...]) -> int:
        return sum(cell[i] * cell[j] * levels for (i, j), levels in apart.items())

    @cache
    def best(left: tuple[int, ...], index: int) -> int:
        if index == len(sizes):
            return 0
        return min(
            (
                cost(cell) + best(tuple(have - taken for have, taken in zip(left, cell, strict=True)), index + 1)
                for cell in _ways(left, sizes[index])
            ),
            default=NO_WAY,
        )

    return best(tuple(counts[place] for place in places), 0)


def _ways(left: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Every way to take `size` in total."""
    if not left:
        if size == 0:
            yield ()
        return
    for taken in range(min(left[0], size) + 1):
        for rest in _ways(left[1:], size - taken):
            yield (taken, *rest)
