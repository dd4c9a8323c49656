"""The cheapest way to place as much demand as fits: a minimum-cost maximum flow from origins to places. Pure.

Successive shortest paths with residual arcs (Ahuja, Magnanti, Orlin, "Network Flows", 1993, section 9.7), on whole
numbers, so that it ends and equal inputs give equal flows. Regions are few; nothing here is tuned for many.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Node = tuple[str, str]
_SOURCE: Node = ("", "source")
_SINK: Node = ("", "sink")


@dataclass(frozen=True, slots=True)
class SinkCapacity:
    """How much a place takes at which cost per unit; a place may have several, to be filled in the order of cost."""

    units: int
    cost: int


def cheapest_flow(
    supply: Mapping[str, int],
    routes: Mapping[tuple[str, str], int],
    rooms: Mapping[str, Iterable[SinkCapacity]],
) -> dict[tuple[str, str], int]:
    """(origin, place) -> units sent. As much as fits is placed, and no other placing of as much costs less.

    `supply` is units by origin, `routes` the cost per unit of each (origin, place) that may be used.
    """
    network = _Network()
    for origin, units in supply.items():
        network.add(_SOURCE, ("from", origin), units, 0)
    arcs = {
        (origin, place): network.add(("from", origin), ("at", place), supply[origin], cost)
        for (origin, place), cost in routes.items()
    }
    for place, room_of_place in rooms.items():
        for room in room_of_place:
            network.add(("at", place), _SINK, room.units, room.cost)
    network.fill()
    return {route: sent for route, arc in arcs.items() if (sent := network.sent(arc)) > 0}


class _Network:
    """Arcs come in pairs: number n and its reverse n ^ 1."""

    def __init__(self) -> None:
        self._head: list[Node] = []
        self._left: list[int] = []
        self._cost: list[int] = []
        self._out: dict[Node, list[int]] = defaultdict(list)

    def add(self, tail: Node, head: Node, units: int, cost: int) -> int:
        number = len(self._head)
        self._head += [head, tail]
        self._left += [units, 0]
        self._cost += [cost, -cost]
        self._out[tail].append(number)
        self._out[head].append(number + 1)
        return number

    def sent(self, arc: int) -> int:
        return self._left[arc ^ 1]

    def fill(self) -> None:
        """Push along cheapest paths until none is left."""
        while path := self._cheapest_path():
            units = min(self._left[arc] for arc in path)
            for arc in path:
                self._left[arc] -= units
                self._left[arc ^ 1] += units

    def _cheapest_path(self) -> list[int]:
        """Arcs from source to sink, the sink's first; empty if none has room (Bellman and Ford, with a queue)."""
        cost = {_SOURCE: 0}
        through: dict[Node, int] = {}
        waiting = deque([_SOURCE])
        while waiting:
            tail = waiting.popleft()
            for arc in self._out[tail]:
                head, sum_ = self._head[arc], cost[tail] + self._cost[arc]
                if self._left[arc] > 0 and (head not in cost or sum_ < cost[head]):
                    cost[head], through[head] = sum_, arc
                    if head not in waiting:
                        waiting.append(head)
        path: list[int] = []
        node = _SINK
        while node in through and node != _SOURCE:
            path.append(through[node])
            node = self._head[through[node] ^ 1]
        return path
