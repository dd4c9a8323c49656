"""Decides where each origin's requests should be served in the end, regardless of the current shares; `autopilot`
decides the speed. Pure.

The solver is a minimum-cost maximum flow from origins to regions (successive shortest paths with residual arcs: Ahuja,
Magnanti, Orlin, "Network Flows", 1993, section 9.7). It uses whole numbers, so equal inputs give equal flows. Fleets
have few regions, so it is not tuned.

Home comes first, then the nearest region with room. No region is filled beyond its cap while demand fits elsewhere, and
residency always holds. Demand that fits nowhere stays at home, so that an overload does not spread; only a home without
capacity distributes it, by capacity, even to regions that have just regained a cell. Distances are as measured and
stated, or else estimated from the map; the estimate only overrides regions."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from traffic.region_shares.planning.policy import ActiveOverrides, Matrix, TrafficPolicy, loads, whole_row

Node = tuple[str, str]
_SOURCE: Node = ("", "source")
_SINK: Node = ("", "sink")


@dataclass(frozen=True, slots=True)
class SinkCapacity:
    """Room of a place at a cost per unit; a place may have several, filled in the order of cost."""

    units: int
    cost: int


def cheapest_flow(
    supply: Mapping[str, int],
    routes: Mapping[tuple[str, str], int],
    rooms: Mapping[str, Iterable[SinkCapacity]],
) -> dict[tuple[str, str], int]:
    """Returns (origin, place) -> units: the maximum flow of least cost. `supply` is units by origin, `routes` the cost
    per unit of each allowed (origin, place)."""
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
        while path := self._cheapest_path():
            units = min(self._left[arc] for arc in path)
            for arc in path:
                self._left[arc] -= units
                self._left[arc ^ 1] += units

    def _cheapest_path(self) -> list[int]:
        """Returns the arcs from sink to source, or an empty list if no path has room (Bellman and Ford, with a
        queue)."""
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


FILL_SHARE = 0.95
"""Regions are filled to this share of their cap and relieved only above the cap, so that small swings move nothing."""
FLOOR = 0.01
"""design.md §5: a live region keeps 1 % of the requests that arrive there, to test its path and warm its caches."""
CHEAPER_BY = 0.1
"""Smaller price differences are ignored, because moving has a cost."""
COST_SLACK = 0.05
"""A cheaper region may exceed `cost_utilisation` by this much before requests move back."""

UNITS_PER_SLOT = 10_000
"""Flows are in ten-thousandths of a concurrent request."""
LEAST_DEMAND = 1 / UNITS_PER_SLOT
"""Replaces zero demand, so that every origin has a row."""
# Costs of a unit. Each rank outweighs any sum of lower ones, however long a chain of displaced regions is.
_MS = 100
_ELSEWHERE = 10**8
_EMPTYING = 10**12
_PAST_FILL = 10**16


@dataclass(frozen=True, slots=True)
class ServingRegion:
    """A region that may serve, in concurrent requests. `capacity` limits additional load, `capacity_now` (never less)
    the load that it may keep; `carried` is its load under the table in force. `starts`: it has no cell yet, and holds
    requests that arrive there only. `returned`: it had no cell a moment ago, and gets only those requests of other
    origins that fit nowhere else."""

    name: str
    capacity: float
    capacity_now: float
    carried: float = 0.0
    starts: bool = False
    returned: bool = False


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """`demand` names every origin."""

    demand: Mapping[str, float]
    places: Mapping[str, ServingRegion]
    policy: TrafficPolicy
    overrides: ActiveOverrides
    latency_ms: Mapping[tuple[str, str], float]

    def cap(self, region: str) -> float:
        """Returns the maximum load of a region with its current capacity."""
        return self.policy.utilisation_cap * self.places[region].capacity_now

    def may_use(self, origin: str, region: str) -> bool:
        return self.may_resort_to(origin, region) and (origin == region or not self.places[region].returned)

    def may_resort_to(self, origin: str, region: str) -> bool:
        place = self.places.get(region)
        if place is None or place.capacity_now <= 0 or region in self.overrides.closed:
            return False
        if place.starts and origin != region:
            return False
        return self.policy.may_serve(origin, region)


@dataclass(frozen=True, slots=True)
class Placement:
    """`unplaced` maps an origin to its concurrent requests beyond all caps; idle origins are absent."""

    matrix: Matrix
    unplaced: Mapping[str, float]

    @property
    def fits(self) -> bool:
        return not self.unplaced


def place_demand(task: PlacementProblem) -> Placement:
    """Returns where all demand goes, and what fits nowhere."""
    fixed = {origin: row for origin, row in task.overrides.rows.items() if origin in task.demand}
    taken = loads(fixed, task.demand)
    free = {origin: units for origin, units in _whole_units(task.demand).items() if origin not in fixed}
    flow = cheapest_flow(
        free, _route_costs(task, free), {name: _region_room(task, name, taken) for name in task.places}
    )
    sent: dict[str, dict[str, float]] = {origin: {} for origin in free}
    for (origin, region), units in flow.items():
        sent[origin][region] = units / UNITS_PER_SLOT
    left = {
        origin: (units - sum(flow.get((origin, region), 0) for region in task.places)) / UNITS_PER_SLOT
        for origin, units in free.items()
    }
    for origin, slots in left.items():
        if slots > 0:
            _place_overflow(task, origin, slots, sent[origin])
    _keep_alive(task, sent, taken)
    _prefer_cheaper(task, sent, taken)
    matrix = {**fixed, **{origin: whole_row(row, origin) for origin, row in sent.items()}}
    unplaced = {origin: slots for origin, slots in left.items() if slots > 2 * LEAST_DEMAND}
    return Placement({origin: matrix[origin] for origin in sorted(matrix)}, unplaced)


def _whole_units(demand: Mapping[str, float]) -> dict[str, int]:
    return {origin: max(1, round(slots * UNITS_PER_SLOT)) for origin, slots in sorted(demand.items())}


def _route_costs(task: PlacementProblem, origins: Iterable[str]) -> dict[tuple[str, str], int]:
    """Returns the cost per unit of every allowed route. The last digits make costs distinct, which breaks ties."""
    return {
        (origin, region): 0
        if origin == region
        else _ELSEWHERE + round(task.latency_ms[origin, region] * _MS) * len(task.places) + rank
        for origin in origins
        for rank, region in enumerate(sorted(task.places))
        if task.may_use(origin, region)
    }


def _region_room(task: PlacementProblem, region: str, taken: Mapping[str, float]) -> tuple[SinkCapacity, ...]:
    """Returns each region's preferred room, and its last-resort room, less what fixed rows send there."""
    place, cap = task.places[region], task.cap(region)
    if place.carried > cap:
        fill, limit = FILL_SHARE * cap, cap
    else:
        counted_on = task.policy.utilisation_cap * place.capacity
        fill, limit = max(FILL_SHARE * counted_on, place.carried), max(counted_on, place.carried)
    used = taken.get(region, 0.0)
    gladly, at_most = (_room_units(slots - used) for slots in (fill, limit))
    if region in task.overrides.emptying:
        return (SinkCapacity(at_most, _EMPTYING),)
    return SinkCapacity(gladly, 0), SinkCapacity(at_most - gladly, _PAST_FILL)


def _room_units(slots: float) -> int:
    return max(0, round(slots * UNITS_PER_SLOT))


def _place_overflow(task: PlacementProblem, origin: str, slots: float, row: dict[str, float]) -> None:
    """Places what fits nowhere at home, or by capacity if home cannot serve. It stays at home if no region can."""
    open_to = {} if task.may_use(origin, origin) else _fallback_capacities(task, origin)
    total = sum(open_to.values())
    if total <= 0:
        row[origin] = row.get(origin, 0.0) + slots
    for region, capacity in open_to.items():
        row[region] = row.get(region, 0.0) + slots * (capacity / total)  # in this order: a product may underflow


def _fallback_capacities(task: PlacementProblem, origin: str) -> dict[str, float]:
    return {name: place.capacity_now for name, place in task.places.items() if task.may_resort_to(origin, name)}


def _keep_alive(task: PlacementProblem, sent: Mapping[str, dict[str, float]], taken: Mapping[str, float]) -> None:
    """Leaves a live home its floor where there is room, taken from its largest share."""
    load = _region_loads(sent, taken)
    for origin, row in sent.items():
        if not task.may_use(origin, origin) or origin in task.overrides.emptying:
            continue
        lacks = FLOOR * sum(row.values()) - row.get(origin, 0.0)
        lacks = min(lacks, task.cap(origin) - load[origin])
        if lacks > 0:
            _move_slots(row, max(row, key=lambda region: (row[region], region)), origin, lacks, load)


def _prefer_cheaper(task: PlacementProblem, sent: Mapping[str, dict[str, float]], taken: Mapping[str, float]) -> None:
    """Moves requests to cheaper nearby regions with room; a home keeps its floor."""
    load, policy = _region_loads(sent, taken), task.policy
    for origin, row in sorted(sent.items()):
        for dear in sorted(row, key=policy.price, reverse=True):
            for cheap in sorted(task.places, key=lambda region: (policy.price(region), region)):
                if not _is_worth_it(task, origin, dear, cheap):
                    continue
                spare = row[dear] - (FLOOR * sum(row.values()) if dear == origin else 0.0)
                _move_slots(row, dear, cheap, max(0.0, min(spare, _cost_room(task, cheap) - load[cheap])), load)


def _is_worth_it(task: PlacementProblem, origin: str, dear: str, cheap: str) -> bool:
    cheaper = task.policy.price(cheap) < (1 - CHEAPER_BY) * task.policy.price(dear)
    near = task.latency_ms[origin, cheap] <= task.policy.cost_latency_ms
    return cheaper and near and task.may_use(origin, cheap) and cheap not in task.overrides.emptying


def _cost_room(task: PlacementProblem, region: str) -> float:
    """Returns how far a cheap region is filled for its price, with some slack for its present load."""
    place, share = task.places[region], task.policy.cost_utilisation
    most = min((share + COST_SLACK) * place.capacity_now, task.cap(region))
    return min(max(share * place.capacity, min(place.carried, most)), task.cap(region))


def _region_loads(sent: Mapping[str, dict[str, float]], taken: Mapping[str, float]) -> dict[str, float]:
    load = defaultdict(float, taken)
    for row in sent.values():
        for region, slots in row.items():
            load[region] += slots
    return load


def _move_slots(row: dict[str, float], source: str, to: str, slots: float, load: dict[str, float]) -> None:
    for region, change in ((source, -slots), (to, slots)):
        row[region] = row.get(region, 0.0) + change
        load[region] += change


MS_PER_KM = 0.015
"""Round trip: light in fibre takes 1 ms per 100 km, and real paths are about 1.5 times the great circle."""
SAME_CITY_MS = 2.0
UNKNOWN_MS = 80.0
"""For a region that is not on the map: about the width of a continent."""
EARTH_RADIUS_KM = 6371.0
PLACES = {
    "us-east-1": (38.9, -77.4), "us-east-2": (40.0, -83.0), "us-west-1": (37.4, -121.9), "us-west-2": (45.8, -119.7),
    "ca-central-1": (45.5, -73.6), "ca-west-1": (51.0, -114.1), "mx-central-1": (20.6, -100.4),
    "sa-east-1": (-23.5, -46.6), "eu-west-1": (53.3, -6.3), "eu-west-2": (51.5, -0.1), "eu-west-3": (48.9, 2.3),
    "eu-central-1": (50.1, 8.7), "eu-central-2": (47.4, 8.5), "eu-north-1": (59.3, 18.1), "eu-south-1": (45.5, 9.2),
    "eu-south-2": (41.6, -0.9), "me-south-1": (26.1, 50.6), "me-central-1": (24.5, 54.4), "il-central-1": (32.1, 34.8),
    "af-south-1": (-33.9, 18.4), "ap-south-1": (19.1, 72.9), "ap-south-2": (17.4, 78.5), "ap-east-1": (22.3, 114.2),
    "ap-southeast-1": (1.35, 103.8), "ap-southeast-2": (-33.9, 151.2), "ap-southeast-3": (-6.2, 106.8),
    "ap-southeast-4": (-37.8, 145.0), "ap-northeast-1": (35.7, 139.7), "ap-northeast-2": (37.6, 127.0),
    "ap-northeast-3": (34.7, 135.5),
}  # fmt: skip
"""Degrees north and east of the city or county after which AWS names the region."""


def latencies_ms(regions: Iterable[str], stated: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Returns (from, to) -> round trip in milliseconds. `stated` has measurements as `from:to` or `to:from`."""
    names = sorted(regions)
    return {(a, b): _latency_ms(a, b, stated) for a in names for b in names}


def _latency_ms(a: str, b: str, stated: Mapping[str, float]) -> float:
    if a == b:
        return 0.0
    for key in (f"{a}:{b}", f"{b}:{a}"):
        if key in stated:
            return stated[key]
    if a not in PLACES or b not in PLACES:
        return UNKNOWN_MS
    return round(SAME_CITY_MS + MS_PER_KM * _distance_km(PLACES[a], PLACES[b]), 1)


def _distance_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    north_a, east_a, north_b, east_b = (math.radians(degrees) for degrees in (*a, *b))
    half = math.sin((north_b - north_a) / 2) ** 2
    half += math.cos(north_a) * math.cos(north_b) * math.sin((east_b - east_a) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(half))
