"""What the capacity planner looks at. Pure data.

Slots are `slot_s` long, the first one begins at `at`. Amounts of work are requests at once, as tested capacity is; work
of batches is requests at once times seconds. Money is US dollars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from engine_agent.protocol.states import ServingClass
from fleet.planning.claims import PRIORITIES
from fleet.planning.forecast.series import SLOT_S, SLOTS

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
