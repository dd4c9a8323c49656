"""How near machines are to each other in the network. The one place that says what distance means; it decides nothing.

A topology is a machine's ordered list of network nodes, widest first, as EC2's DescribeInstanceTopology gives it. Two
machines share a prefix of it: the longer, the fewer hops lie between them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

Path = tuple[str, ...]

POSITIONS_TRIED = 256
"""Places beyond the machines that there are, among which one near another is looked for."""


def shared_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of network nodes, counted from the widest, that two topologies have in common."""
    for depth, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return depth
    return min(len(one), len(other))


def depth_of(topologies: Iterable[Sequence[str]]) -> int:
    """Levels of a pool's network: the length of its longest topology, and 1 where none is known."""
    return max((len(topology) for topology in topologies), default=1) or 1


def distance(one: Sequence[str], other: Sequence[str], depth: int) -> int:
    """Levels of the network that two different machines do not share, 0 (same lowest network node) to `depth`.

    `depth - shared_prefix`: what is unknown of a topology is shared with no other, so an unknown place is far from all.
    """
    return depth - shared_prefix(one, other)


def total_distance(cells: Iterable[Sequence[Sequence[str]]], depth: int) -> int:
    """Total network distance of cells, each given by the topologies of its nodes:

        sum over cells of the sum over pairs {a, b} of its nodes of distance(a, b)

    Every pair counts, because collectives make every rank wait for the farthest.
    """
    return sum(distance(one, other, depth) for cell in cells for one, other in combinations(cell, 2))


def common_prefix(topologies: Sequence[Sequence[str]]) -> Path:
    """The network nodes that all of these have in common, widest first."""
    first = topologies[0]
    return tuple(first[: min(shared_prefix(first, other) for other in topologies)])


def failure_domain(topology: Sequence[str]) -> str:
    """What fails together: all below one widest network node, which lies in one availability zone. Empty: unknown."""
    return topology[0] if topology else ""


def free_position(place_at: Callable[[int], Path], taken: Iterable[Path], near: Path) -> int:
    """The number of the place where a new machine should stand: the first free one of those nearest to `near`.

    Places are numbered from 0, and `place_at` says below which network nodes each is; several may be below the same.
    `taken` has the topologies of the machines that there are.
    """
    left = Counter(taken)
    best, longest = 0, -1
    for position in range(left.total() + POSITIONS_TRIED):
        place = place_at(position)
        if left[place]:
            left[place] -= 1
            continue
        shared = shared_prefix(place, near)
        if shared > longest:
            best, longest = position, shared
        if shared == len(near):
            break
    return best
