"""What the capacity planner looks at. Pure data.

Slots are `slot_s` long, the first one begins at `at`. Amounts of work are requests at once, as tested capacity is; work
of batches is requests at once times seconds. Money is US dollars.

What of a plan counts for one place: its cells of all types together, slot by slot, and the need that the autoscaler
takes from the next ones. Pure; no numpy, for web and the control loops.

Which machines are to be warm before the cells that the plan of the day wants: a machine boots before its cell loads,
so it is ordered a boot earlier than the autoscaler orders the cell, and one that is needed again soon is not given
back. Pure; no numpy, for the reconciler.

It launches nothing: what it says stands beside the spares that an operator keeps, and the reconciler launches and gives
back by that as ever, within the caps of its provider and the limits of a pass.
"""

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
    """A deployment's cell on an instance type. `per_cell`: requests at once that it was tested for; `nodes`: machines
    that it takes; `lost_cache`: what a start costs beside its machines, for caches that are cold."""

    instance_type: str
    per_cell: float
    nodes: int = 1
    lost_cache: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What is expected of real-time work, slot by slot, as quantiles of the mean of the slot."""

    p50: tuple[float, ...]
    p90: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Work that should be done `within_s` of `at`; several that are due at different times add up. `is_late`: it would
    not be done in time otherwise, so it is covered like real-time work, evenly until a tenth of its time is left."""

    work: float
    within_s: float
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A deployment in a region. `cells`: there now or starting, by instance type. `demand` None: nobody forecasts it,
    so it keeps what it has. `least` and `most`: cells of all types together; equal where a person sets the number.
    `is_bound_by_budget`: its range goes on beyond `most`."""

    region: str
    least: int
    most: int
    cells: Mapping[str, int]
    demand: Demand | None = None
    batch: tuple[BatchWork, ...] = ()
    is_bound_by_budget: bool = False


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """`target`: to which share of tested capacity real-time work fills cells; `start_up_s`: from a decision until a
    cell is ready. The higher its `priority`, the later it lacks machines that are short."""

    name: str
    start_up_s: float
    kinds: tuple[CellKind, ...]
    places: tuple[PlannedPlace, ...]
    target: float = 0.7
    priority: int = USUAL_PRIORITY


@dataclass(frozen=True, slots=True)
class MachinePool:
    """Machines of one type in a region that are had at one price, per machine and hour: what is saved where one is not
    used. 0 for those that are paid for anyhow. `count`: how many there may be; `now`: how many there are. `from_s` and
    `until_s`: of a block, in which time of the plan it can be used."""

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
    """`batch_fill`: to which share of tested capacity cells are filled with batch work beside what is expected at p50.
    `surge_fill`: and with real-time work at p90, where they are filled to the target with what is expected: a target's
    head-room is for what a forecast is off by, too, so it is not bought twice.
    `solve_s`: until the solver of the day must have answered; `whole_s`: that of whole numbers in the first
    `whole_slots`, which is asked up to `whole_most` variables. The prices of what is lacking, in multiples of the
    dearest capacity: a step of priority doubles that of real-time work."""

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
    """What a plan does not cover. Of `realtime` work from `at_s` on, in `lasts_s` all together, `requests` at once at
    most; of `batch` work that is due at `at_s`, `requests` at once as the mean of the seconds until then."""

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
    """Requests at once of real-time work that are expected, and those that are to be covered, slot by slot.
    `start_up_s`: in which time a cell was taken to start."""

    deployment: str
    region: str
    expected: tuple[float, ...]
    cover: tuple[float, ...]
    start_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What real-time work is not expected to use: requests at once that batches may have, slot by slot; and of which
    the plan counts on being used for what is due."""

    deployment: str
    region: str
    requests: tuple[float, ...]
    due: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """Machines of a pool that are used or kept, slot by slot."""

    region: str
    instance_type: str
    pool: str
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A change from one slot to the next. `kind`: `start` and `stop` cells, `move` nodes that are `taken_from` another
    deployment, region or type, `launch` and `give_back` machines of a pool. `dollars`: what it costs (an hour of the
    machines and the price of a shift), less than 0 for what it saves an hour."""

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
    """`solver`: which way it was found: `whole`, `lp` or `greedy`; `why`: why not by a better one. `dollars`: what
    machines and shifts cost slot by slot; `shifts`: starts of cells that they include."""

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


# How many cells of a deployment its budget pays for, region by region. Pure; no numpy, for web.
# The autoscaler shares a budget by what is lacking at the moment. A plan cannot, for a day has many moments; so it
# goes by the greatest load that is expected of each region.


def within_budget(
    places: Sequence[PlannedPlace], prices: Mapping[str, float], budget: float | None
) -> tuple[PlannedPlace, ...]:
    """The places of a deployment with no more cells than its budget, US dollars an hour, pays for all together: what
    the least of each leaves of it is shared by the greatest p90. `prices`: US dollars an hour of a cell by region; 0:
    unknown, which counts as nothing, as for the autoscaler. What ranges begin with is never taken away for it."""
    if budget is None:
        return tuple(places)
    left = max(0.0, budget - sum(place.least * prices[place.region] for place in places))
    peaks = {one.region: max(one.demand.p90, default=0.0) if one.demand else 0.0 for one in places}
    total = sum(peaks.values())
    return tuple(
        _bounded(one, left * peaks[one.region] / total if total else 0.0, prices[one.region]) for one in places
    )


def _bounded(place: PlannedPlace, left: float, price: float) -> PlannedPlace:
    """Where nobody forecasts the load the plan keeps what there is, and buys nothing."""
    if not price or place.demand is None:
        return place
    most = place.least + int(left / price)
    return replace(place, most=most, is_bound_by_budget=True) if most < place.most else place


FRESH_S = 2700.0
"""A plan is made every quarter of an hour; after two that were missed it counts no more."""


HELD_S = 1800.0
"""Cells are held for what the plan has so long after the need: who starts a cell again within half an hour pays for two
starts, and the next plan may turn as well. Over two recorded weeks that more than halves the turns, for a thousandth of
the cost (docs/bench/capacity_plan.md)."""


@dataclass(frozen=True, slots=True)
class PlacePlan:
    """A deployment in a region, slot by slot from `at` on: cells; requests at once that are expected, those that are to
    be covered, those that batches may have (none where nobody forecasts the load), and what of these is due.
    `start_up_s`: in which time a cell was taken to start."""

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
    """What the plan would have at so many times the load, as near as arithmetic comes without a solver: cells grow by
    what they have room for; batches that are due are as many as before. It knows no range and no machines."""
    due = place.due or (0.0,) * len(place.cells)
    cells = tuple(
        math.ceil(count * (cover * factor + more) / (cover + more) - 1e-9) if cover + more else count
        for count, cover, more in zip(place.cells, place.cover, due, strict=True)
    )
    expected, cover = (tuple(value * factor for value in row) for row in (place.expected, place.cover))
    return replace(place, cells=cells, expected=expected, cover=cover)


def need_within(place: PlacePlan, now: datetime, start_up_s: float) -> PlannedNeed | None:
    """The most cells until one that is ordered now has served for a slot, and as what is enough the most until half an
    hour later; None: the plan is too old, or of a time to come, or nobody forecasts the load, so that it only has what
    there was."""
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
    batches = f", and batches that are due take {due:.1f}" if due else ""
    reason = (
        f"from {begins_at:%H:%M} UTC on {place.expected[slot]:.1f} requests at once are expected and "
        f"{place.cover[slot]:.1f} to be covered{batches}"
    )
    later = last + 1 + math.ceil(HELD_S / place.slot_s)
    return PlannedNeed(max(row), reason, max(place.cells[first:later]))


def batch_seconds(place: PlacePlan, now: datetime, within_s: float) -> float:
    """Requests at once times seconds that batches may have from `now` on within a time. Beyond the end of the plan the
    mean of its day."""
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
    """Seconds from `now` until batches may have had so much work, requests at once times seconds; None: never, as the
    day is planned."""
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
"""Region, instance type."""
CellGroup = tuple[str, str, str]
"""Deployment, region, instance type."""


@dataclass(frozen=True, slots=True)
class PlannedSpares:
    """Idle nodes to have warm for cells that the plan of the day wants soon, and for which. `cells`: how many nodes
    each of these takes, which are to be near each other."""

    count: int
    reason: str
    cells: tuple[int, ...] = ()


def cells_there(fleet: FleetView) -> Counter[CellGroup]:
    """How many cells places have that stay, by type."""
    staying = (cell for cell in fleet.cells.values() if cell.state not in LEAVING)
    return Counter((cell.deployment, cell.region, cell.instance_type) for cell in staying)


def planned_spares(fleet: FleetView, there: Mapping[CellGroup, int], now: datetime) -> dict[Group, PlannedSpares]:
    """Machines beside those of the cells that there are: the most of any slot until a machine that is ordered now has
    booted, and a cell on it has served for a slot. Cells that are wanted and not there yet count, or the machines that
    were ready for them would be given back in the pass that makes them; not where they may be of one type or another,
    which is decided as they come. What another deployment will need less is
    counted off. What is planned is all of one plan; one that is too old, or whose deployment may have no more cells for
    want of machines, counts for nothing."""
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
        group: _most(slots, {name: size for (kind, name), size in sizes.items() if kind == group[1]})
        for group, slots in sorted(more.items())
    }
    return {group: spares for group, spares in found.items() if spares.count > 0}


def _most(slots: Mapping[datetime, Mapping[str, int]], sizes: Mapping[str, int]) -> PlannedSpares:
    begins_at = max(slots, key=lambda at: (sum(slots[at].values()), -at.timestamp()))
    changes = sorted(slots[begins_at].items(), key=lambda one: (-abs(one[1]), one[0]))
    named = ", ".join(f"{nodes:+d} of {deployment}" for deployment, nodes in changes[:NAMED_MOST] if nodes)
    count = sum(slots[begins_at].values())
    reason = f"from {begins_at:%H:%M} UTC on its cells take {count} machine{'' if count == 1 else 's'} more ({named})"
    cells = [sizes[name] for name, nodes in changes for _ in range(nodes // sizes[name])]
    return PlannedSpares(count, reason, tuple(cells))
