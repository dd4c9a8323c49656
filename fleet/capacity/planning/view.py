"""Input and output of the capacity planner, and what other planners take from a plan: the autoscaler's need, batch
budgets, and machines to warm up. Pure, without numpy, for web and the control loops. Slots are `slot_s` long; the first
begins at `at`. Work is concurrent requests, as tested capacity is; batch work is concurrent requests times seconds.
Money is US dollars. A machine boots before its cell loads, so it is ordered one boot time before the autoscaler orders
the cell, and kept if it is soon needed again. The reconciler launches and releases such machines like operators'
spares, within caps and limits."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.planning.needs import PlannedNeed
from fleet.capacity.planning.forecast_series import SLOT_S, SLOTS
from fleet.deployments.planner import PRIORITIES
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState

USUAL_PRIORITY = PRIORITIES[ServingClass.REALTIME]


@dataclass(frozen=True, slots=True)
class CellKind:
    """A deployment's cell on an instance type. `per_cell`: tested concurrent requests; `nodes`: its machines;
    `lost_cache`: cost of cold caches after a start."""

    instance_type: str
    per_cell: float
    nodes: int = 1
    lost_cache: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Expected real-time load, as quantiles of each slot's mean."""

    p50: tuple[float, ...]
    p90: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Work due `within_s` after `at`; work with several due times adds up. `is_late`: it would not finish in time, so
    it is covered like real-time work, evenly until a tenth of its time is left."""

    work: float
    within_s: float
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A deployment in a region. `cells`: running or starting, by type. `demand` None: no forecast, so it keeps its
    cells. `least` and `most`: cells of all types; equal if a user sets the number. `is_bound_by_budget`: the range
    continues beyond `most`."""

    region: str
    least: int
    most: int
    cells: Mapping[str, int]
    demand: Demand | None = None
    batch: tuple[BatchWork, ...] = ()
    is_bound_by_budget: bool = False


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """`target`: share of tested capacity for real-time work; `start_up_s`: from a decision until a cell is ready.
    Deployments with a higher `priority` lose scarce machines later."""

    name: str
    start_up_s: float
    kinds: tuple[CellKind, ...]
    places: tuple[PlannedPlace, ...]
    target: float = 0.7
    priority: int = USUAL_PRIORITY


@dataclass(frozen=True, slots=True)
class MachinePool:
    """Machines of one type in a region at one price per machine and hour, which an unused machine saves; 0 if paid in
    any case. `count`: maximum; `now`: running. `from_s` and `until_s`: usable time of a block in the plan."""

    region: str
    instance_type: str
    name: str
    count: int
    price: float
    now: int = 0
    from_s: float = 0.0
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class CapacityView:
    at: datetime
    deployments: tuple[PlannedDeployment, ...]
    pools: tuple[MachinePool, ...]
    slot_s: int = SLOT_S
    slots: int = SLOTS


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """`batch_fill`: share of tested capacity for batches and expected load (p50) together. `surge_fill`: for real-time
    work at p90, above the target, because a target's head-room already covers forecast errors. `solve_s`: time limit of
    the day's program; `whole_s`: of integers in the first `whole_slots`, tried with up to `whole_most` variables.
    Penalties of uncovered load are multiples of the most expensive capacity: a step of priority doubles that of
    real-time work."""

    batch_fill: float = 0.9
    surge_fill: float = 0.9
    solve_s: float = 30.0
    whole_s: float = 1.0
    whole_slots: int = 2
    whole_most: int = 8000
    realtime_price: float = 50.0
    batch_price: float = 4.0


@dataclass(frozen=True, slots=True)
class Lack:
    """Load that a plan does not cover. `realtime`: from `at_s` on, for `lasts_s` in total, at most `requests`
    concurrently. `batch` work due at `at_s`: `requests` is the mean until then."""

    deployment: str
    region: str
    what: str
    at_s: float
    requests: float
    reason: str
    lasts_s: int


@dataclass(frozen=True, slots=True)
class PlannedCells:
    """Cells of a deployment in a region on one type, slot by slot."""

    deployment: str
    region: str
    instance_type: str
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Concurrent real-time requests, expected and to cover, slot by slot. `start_up_s`: assumed start time of
    a cell."""

    deployment: str
    region: str
    expected: tuple[float, ...]
    cover: tuple[float, ...]
    start_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """Concurrent requests for batches, slot by slot, and the part planned for due work."""

    deployment: str
    region: str
    requests: tuple[float, ...]
    due: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """Machines of a pool, used or kept, slot by slot."""

    region: str
    instance_type: str
    pool: str
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A change between two slots. `kind`: `start` and `stop` cells, `move` nodes `taken_from` another deployment,
    region or type, `launch` and `give_back` machines of a pool. `dollars`: cost of an hour and the shift; below 0:
    savings in an hour."""

    at_s: float
    kind: str
    deployment: str
    region: str
    instance_type: str
    count: int
    dollars: float
    reason: str
    taken_from: str = ""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`solver`: `whole`, `lp` or `greedy`; `why` no better one. `dollars`: of machines and shifts, slot by slot;
    `shifts`: starts of cells."""

    at: datetime
    slot_s: int
    solver: str
    why: str
    cells: tuple[PlannedCells, ...]
    loads: tuple[PlannedLoad, ...]
    budgets: tuple[BatchBudget, ...]
    machines: tuple[PlannedMachines, ...]
    orders: tuple[Order, ...]
    lacks: tuple[Lack, ...]
    dollars: tuple[float, ...]
    shifts: int
    settings: CapacitySettings = field(default_factory=CapacitySettings)

    @property
    def total(self) -> float:
        return sum(self.dollars)


# Cells that a deployment's budget allows, by region.
# The autoscaler shares a budget by the current lack. A plan covers a whole day, so it shares by each region's
# highest expected load.


def within_budget(
    places: Sequence[PlannedPlace], prices: Mapping[str, float], budget: float | None
) -> tuple[PlannedPlace, ...]:
    """Limits the places of a deployment to its budget in US dollars an hour: each gets its minimum, and the rest is
    shared by the highest p90. `prices`: US dollars an hour of a cell by region; 0: unknown, which counts as nothing, as
    in the autoscaler. Minimums always stay."""
    if budget is None:
        return tuple(places)
    left = max(0.0, budget - sum(place.least * prices[place.region] for place in places))
    peaks = {one.region: max(one.demand.p90, default=0.0) if one.demand else 0.0 for one in places}
    total = sum(peaks.values())
    return tuple(
        _bounded(one, left * peaks[one.region] / total if total else 0.0, prices[one.region]) for one in places
    )


def _bounded(place: PlannedPlace, left: float, price: float) -> PlannedPlace:
    """Without a forecast the plan keeps the cells and buys none."""
    if not price or place.demand is None:
        return place
    most = place.least + int(left / price)
    return replace(place, most=most, is_bound_by_budget=True) if most < place.most else place


FRESH_S = 2700.0
"""Plans come every 15 minutes; after two missed ones a plan expires."""


HELD_S = 1800.0
"""Cells are kept so long after the planned need: a restart within half an hour costs two starts, and the next plan may
differ. Over two recorded weeks this more than halves the changes for a thousandth of the cost
(docs/bench/capacity_plan.md)."""


@dataclass(frozen=True, slots=True)
class PlacePlan:
    """A deployment in a region, slot by slot from `at` on: cells; concurrent requests expected, to cover, and for
    batches (none without a forecast), and the due part. `start_up_s`: assumed start time of a cell."""

    at: datetime
    slot_s: int
    cells: tuple[int, ...]
    expected: tuple[float, ...]
    cover: tuple[float, ...]
    budget: tuple[float, ...] = ()
    due: tuple[float, ...] = ()
    start_up_s: float = 0.0

    def is_fresh(self, now: datetime) -> bool:
        return 0.0 <= (now - self.at).total_seconds() < FRESH_S


def place_plan(plan: CapacityPlan, deployment: str, region: str) -> PlacePlan | None:
    key = (deployment, region)
    rows = [row.cells for row in plan.cells if (row.deployment, row.region) == key]
    load = next((row for row in plan.loads if (row.deployment, row.region) == key), None)
    if not rows or load is None:
        return None
    budget = next((row for row in plan.budgets if (row.deployment, row.region) == key), None)
    cells = tuple(sum(slot) for slot in zip(*rows, strict=True))
    free = (budget.requests, budget.due) if budget else ((), ())
    return PlacePlan(plan.at, plan.slot_s, cells, load.expected, load.cover, *free, start_up_s=load.start_up_s)


def at_load(place: PlacePlan, factor: float) -> PlacePlan:
    """Approximates the plan at a multiple of the load, without a solver: cells grow with the load, due batches stay.
    Ignores ranges and machines."""
    due = place.due or (0.0,) * len(place.cells)
    cells = tuple(
        math.ceil(count * (cover * factor + more) / (cover + more) - 1e-9) if cover + more else count
        for count, cover, more in zip(place.cells, place.cover, due, strict=True)
    )
    expected, cover = (tuple(value * factor for value in row) for row in (place.expected, place.cover))
    return replace(place, cells=cells, expected=expected, cover=cover)


def need_within(place: PlacePlan, now: datetime, start_up_s: float) -> PlannedNeed | None:
    """Returns the most cells until a cell ordered now has served for a slot, and as a sufficient number the most until
    half an hour later; None if the plan is expired, in the future, or without a forecast."""
    if not place.is_fresh(now) or not place.budget:
        return None
    age_s = (now - place.at).total_seconds()
    first, last = (int(seconds // place.slot_s) for seconds in (age_s, age_s + start_up_s + place.slot_s))
    row = place.cells[first : last + 1]
    if not row:
        return None
    slot = first + row.index(max(row))
    begins_at = place.at + timedelta(seconds=slot * place.slot_s)
    due = place.due[slot] if place.due else 0.0
    batches = f", and due batches use {due:.1f}" if due else ""
    reason = (
        f"from {begins_at:%H:%M} UTC on {place.expected[slot]:.1f} concurrent requests are expected "
        f"and {place.cover[slot]:.1f} must be covered{batches}"
    )
    later = last + 1 + math.ceil(HELD_S / place.slot_s)
    return PlannedNeed(max(row), reason, max(place.cells[first:later]))


def batch_seconds(place: PlacePlan, now: datetime, within_s: float) -> float:
    """Concurrent requests times seconds for batches from `now` on. After the plan's end, the mean of its day."""
    if not place.budget:
        return 0.0
    age_s = max(0.0, (now - place.at).total_seconds())
    total, ends_s = 0.0, age_s + within_s
    for slot, requests in enumerate(place.budget):
        begin, end = slot * place.slot_s, (slot + 1) * place.slot_s
        total += requests * max(0.0, min(end, ends_s) - max(begin, age_s))
    beyond_s = ends_s - max(age_s, len(place.budget) * place.slot_s)
    return total + max(0.0, beyond_s) * sum(place.budget) / len(place.budget)


def batch_time_s(place: PlacePlan, now: datetime, work: float) -> float | None:
    """Seconds from `now` until batches get that much work, in concurrent requests times seconds; None: never in this
    plan."""
    if not place.budget or not (mean := sum(place.budget) / len(place.budget)):
        return None
    age_s, left = max(0.0, (now - place.at).total_seconds()), work
    for slot, requests in enumerate(place.budget):
        begin, end = max(slot * place.slot_s, age_s), (slot + 1) * place.slot_s
        if end > begin and requests * (end - begin) >= left:
            return begin + left / requests - age_s if left > 0 else 0.0
        left -= requests * max(0.0, end - begin)
    return max(0.0, len(place.budget) * place.slot_s - age_s) + left / mean


LEAVING = frozenset({CellState.DRAINING, CellState.STOPPED})
NAMED_MOST = 3
Group = tuple[str, str]
CellGroup = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class PlannedSpares:
    """Idle nodes to keep warm for planned cells. `cells`: nodes of each, which should be near each other."""

    count: int
    reason: str
    cells: tuple[int, ...] = ()


def cells_there(fleet: FleetView) -> Counter[CellGroup]:
    staying = (cell for cell in fleet.cells.values() if cell.state not in LEAVING)
    return Counter((cell.deployment, cell.region, cell.instance_type) for cell in staying)


def planned_spares(fleet: FleetView, there: Mapping[CellGroup, int], now: datetime) -> dict[Group, PlannedSpares]:
    """Returns machines besides those of existing cells: the most of any slot until a machine ordered now has booted and
    its cell has served for a slot. Wanted cells that do not exist yet count, so that their machines are not released in
    the pass that creates the cells; not if several types are possible. Machines that another deployment releases are
    subtracted. Only one fresh plan counts, and no deployment that lacks machines."""
    more: dict[Group, dict[datetime, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    sizes: dict[tuple[str, str], int] = {}
    for place in fleet.planned:
        spec, region = fleet.deployments.get(place.deployment), fleet.regions.get(place.region)
        age_s = (now - place.at).total_seconds()
        if spec is None or spec.problem or region is None or not 0 <= age_s < FRESH_S:
            continue
        if spec.claim(place.region).granted is not None:
            continue
        kind = place.instance_type or spec.instance_type
        size, have = spec.of(spec.version, kind).nodes_per_cell, there.get((spec.name, place.region, kind), 0)
        wanted = have if spec.further else spec.cells_wanted.get(place.region, 0)
        ahead_s = place.start_up_s + place.slot_s + region.limits.boot_s
        for slot in range(int(age_s // place.slot_s), int((age_s + ahead_s) // place.slot_s) + 1):
            if slot < len(place.cells):
                begins_at = place.at + timedelta(seconds=slot * place.slot_s)
                planned = place.cells[slot] if wanted <= have else max(place.cells[slot], wanted)
                more[place.region, kind][begins_at][spec.name] = (planned - have) * size
                sizes[kind, spec.name] = size
    found = {
        group: _most_spares(slots, {name: size for (kind, name), size in sizes.items() if kind == group[1]})
        for group, slots in sorted(more.items())
    }
    return {group: spares for group, spares in found.items() if spares.count > 0}


def _most_spares(slots: Mapping[datetime, Mapping[str, int]], sizes: Mapping[str, int]) -> PlannedSpares:
    begins_at = max(slots, key=lambda at: (sum(slots[at].values()), -at.timestamp()))
    changes = sorted(slots[begins_at].items(), key=lambda one: (-abs(one[1]), one[0]))
    named = ", ".join(f"{nodes:+d} of {deployment}" for deployment, nodes in changes[:NAMED_MOST] if nodes)
    count = sum(slots[begins_at].values())
    reason = f"from {begins_at:%H:%M} UTC on its cells need {count} machine{'' if count == 1 else 's'} more ({named})"
    cells = [sizes[name] for name, nodes in changes for _ in range(nodes // sizes[name])]
    return PlannedSpares(count, reason, tuple(cells))
