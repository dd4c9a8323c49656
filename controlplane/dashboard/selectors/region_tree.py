"""Where a region's nodes are: zone, network nodes, machines, as a tree for its page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fleet.models import Cell, CellMember, Node, Region
from fleet.planning.states import NodeState

NODES_DRAWN = 1000


@dataclass(frozen=True, slots=True)
class Mark:
    node: Node
    role: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Nodes of one cell that are at one place; `cell` None: in none."""

    cell: Cell | None
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A zone, or a network node below it. `names`: its own, and those of all below it that have nothing beside them.
    `nodes`: how many are below it."""

    names: tuple[str, ...]
    nodes: int
    places: tuple["Place", ...]
    groups: tuple[Marks, ...]


@dataclass(frozen=True, slots=True)
class RegionTree:
    """`unknown`: nodes whose place is not known. `more`: there are more nodes than are drawn."""

    places: tuple[Place, ...]
    unknown: tuple[Marks, ...]
    drawn: int
    more: bool


def region_tree(region: Region) -> RegionTree:
    live = Node.objects.filter(region=region).exclude(state=NodeState.RETIRED)
    found = list(live.select_related("member__cell").order_by("topology", "id")[: NODES_DRAWN + 1])
    nodes = found[:NODES_DRAWN]
    placed = [(tuple(node.topology), node) for node in nodes if node.topology]
    unknown = _groups([node for node in nodes if not node.topology])
    return RegionTree(places_of(placed), unknown, len(nodes), more=len(found) > NODES_DRAWN)


def places_of(placed: Iterable[tuple[tuple[str, ...], Node]]) -> tuple[Place, ...]:
    """The places right below one, from what is below it: the rest of each path, and the node."""
    ordered = sorted(placed, key=lambda pair: (pair[0], pair[1].pk))
    places = []
    for name, below in groupby(ordered, key=lambda pair: pair[0][0]):
        pairs = [(path[1:], node) for path, node in below]
        here = [node for path, node in pairs if not path]
        places.append(_place(name, places_of((path, node) for path, node in pairs if path), here))
    return tuple(places)


def _place(name: str, below: tuple[Place, ...], here: Sequence[Node]) -> Place:
    if len(below) == 1 and not here:
        only = below[0]
        return Place((name, *only.names), only.nodes, only.places, only.groups)
    return Place((name,), len(here) + sum(place.nodes for place in below), below, _groups(here))


def _groups(nodes: Sequence[Node]) -> tuple[Marks, ...]:
    """Cells by name, their nodes by rank; the nodes of none come last."""
    by_cell: dict[str, list[tuple[int, Mark]]] = {}
    cells: dict[str, Cell] = {}
    for node in nodes:
        member: CellMember | None = getattr(node, "member", None)
        key = member.cell_id if member else ""
        if member:
            cells[key] = member.cell
        role = f"{member.role} of {member.cell_id}" if member else "spare"
        by_cell.setdefault(key, []).append((member.rank if member else 0, Mark(node, role)))
    order = sorted(by_cell, key=lambda key: (not key, key))
    return tuple(
        Marks(cells.get(key), tuple(mark for _, mark in sorted(by_cell[key], key=lambda one: (one[0], one[1].node.pk))))
        for key in order
    )
