"""Network distance between machines, defined only here. Decides nothing. A topology is a machine's ordered list of
network nodes, widest first, as in EC2's DescribeInstanceTopology. The longer the common prefix of two machines, the
fewer hops are between them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

Path = tuple[str, ...]

POSITIONS_TRIED = 256
"""Number of further places searched for one near another machine."""


def shared_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of common network nodes of two topologies, from the widest."""
    for depth, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return depth
    return min(len(one), len(other))


def depth_of(topologies: Iterable[Sequence[str]]) -> int:
    """Levels of a pool's network: the length of its longest topology, at least 1."""
    return max((len(topology) for topology in topologies), default=1) or 1


def distance(one: Sequence[str], other: Sequence[str], depth: int) -> int:
    """Levels that two different machines do not share, from 0 (same lowest network node) to `depth`. Unknown levels
    count as not shared, so an unknown place is far from all."""
    return depth - shared_prefix(one, other)


def total_distance(cells: Iterable[Sequence[Sequence[str]]], depth: int) -> int:
    """Total network distance of cells, each given by the topologies of its nodes:

        sum over cells of the sum over pairs {a, b} of its nodes of distance(a, b)

    Every pair counts, because collectives make every rank wait for the farthest."""
    return sum(distance(one, other, depth) for cell in cells for one, other in combinations(cell, 2))


def common_prefix(topologies: Sequence[Sequence[str]]) -> Path:
    """The network nodes common to all, widest first."""
    first = topologies[0]
    return tuple(first[: min(shared_prefix(first, other) for other in topologies)])


def failure_domain(topology: Sequence[str]) -> str:
    """The widest network node, which is in one availability zone and fails as a whole, or "" if unknown."""
    return topology[0] if topology else ""


def free_position(place_at: Callable[[int], Path], taken: Iterable[Path], near: Path) -> int:
    """The first free place nearest to `near` for a new machine. Places are numbered from 0; `place_at` gives the
    network nodes of each, which several may share. `taken`: topologies of existing machines."""
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
