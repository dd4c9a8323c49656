"""Plans how many cells each deployment has where, on which type and when over a day, the machines for them, and the
share of batches. Pure. Each region is planned alone, because regions share no machines: a linear program of least
dollars for machines, starts and uncovered load, solved by HiGHS, rounded up and repaired; whole numbers in the first
slots if that is fast; without a solver's answer, a greedy plan (cheapest cells, most important deployments first, then
batches). Load that exceeds a region's machines is planned in other regions. The same view always gives the same plan:
HiGHS uses one thread, and a solution that misses its time limit is discarded, so that the clock can only choose between
two fixed plans. Rows of the program are built with arrays, because there are tens of thousands."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fleet.capacity.planning.arrays import (
    ROUNDING,
    Array,
    Arrays,
    Due,
    arrays_of,
    bounded,
    dear_first,
    machines_of,
    pool_use,
    whole_cells,
)
from fleet.capacity.planning.outcome import (
    RegionPlan,
    budgets,
    dollars,
    lacks,
    loads,
    machines,
    orders_of,
    planned_cells,
    spare_cells,
    starts,
    unserved,
)
from fleet.capacity.planning.view import CapacityPlan, CapacitySettings, CapacityView, Demand, PlannedDeployment

if TYPE_CHECKING:
    import highspy


TINY = 1e-6
"""Dollars of a cell and slot, so that of equally expensive plans the smallest is found."""


@dataclass(frozen=True)
class Program:
    """Minimises `cost @ x` with `lower <= x <= upper` and `row_lower <= A x <= row_upper`; `A` in rows as `starts` (one
    more than rows), `columns`, `values`. `whole`: integer columns."""

    cost: Array
    lower: Array
    upper: Array
    row_lower: Array
    row_upper: Array
    starts: Array
    columns: Array
    values: Array
    whole: Array


class _Rows:
    def __init__(self) -> None:
        self.count = 0
        self._at: list[tuple[Array, Array, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def block(self, shape: tuple[int, ...], lower: Array | float, upper: Array | float) -> Array:
        """Returns the numbers of new rows, in this shape."""
        size = int(np.prod(shape))
        numbers = np.arange(self.count, self.count + size).reshape(shape)
        self.count += size
        self._bounds.append(tuple(np.broadcast_to(bound, shape).ravel() for bound in (lower, upper)))  # type: ignore[arg-type]
        return numbers

    def put(self, rows: Array, columns: Array, values: Array | float) -> None:
        shape = np.broadcast_shapes(rows.shape, columns.shape)
        parts = (np.broadcast_to(part, shape).ravel() for part in (rows, columns, np.asarray(values, dtype=float)))
        self._at.append(tuple(parts))  # type: ignore[arg-type]

    def matrix(self) -> tuple[Array, Array, Array]:
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._at, strict=True))
        order = np.lexsort((columns, rows))
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=self.count))])
        return starts, columns[order], values[order]

    def bounds(self) -> tuple[Array, Array]:
        return tuple(np.concatenate(parts) for parts in zip(*self._bounds, strict=True))  # type: ignore[return-value]


@dataclass(frozen=True)
class Columns:
    """Numbers of the columns, each for every slot: cells and starts of kinds; uncovered load and batch work of places;
    machines of pools; undone work of dues."""

    cells: Array
    starts: Array
    lacks: Array
    batch: Array
    machines: Array
    undone: Array

    @property
    def count(self) -> int:
        return sum(part.size for part in (self.cells, self.starts, self.lacks, self.batch, self.machines, self.undone))


def columns_of(arrays: Arrays) -> Columns:
    slots, kinds, places = arrays.view.slots, len(arrays.kinds), len(arrays.places)
    shapes = [(rows, slots) for rows in (kinds, kinds, places, places, len(arrays.pools))] + [(len(arrays.dues), 1)]
    ends = np.cumsum([0, *(rows * width for rows, width in shapes)])
    parts = [np.arange(begin, end).reshape(shape) for begin, end, shape in zip(ends, ends[1:], shapes, strict=False)]
    return Columns(*parts)


def program_of(arrays: Arrays) -> Program:
    columns, rows = columns_of(arrays), _Rows()
    _cover(arrays, columns, rows)
    _starts(arrays, columns, rows)
    _machines(arrays, columns, rows)
    _add_due_rows(arrays, columns, rows)
    starts, at, values = rows.matrix()
    row_lower, row_upper = rows.bounds()
    upper = _upper(arrays, columns)
    whole = np.zeros(columns.count, dtype=bool)
    whole[columns.cells[:, : arrays.settings.whole_slots].ravel()] = True
    return Program(
        _cost(arrays, columns), np.zeros(columns.count), upper, row_lower, row_upper, starts, at, values, whole
    )


def _cover(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Cells plus uncovered load reach the load to cover; cells without batches reach the expected load. All types of a
    place together stay within its range."""
    shape, place = arrays.cover.shape, arrays.place_of
    covered = rows.block(shape, arrays.cover, np.inf)
    rows.put(covered[place], columns.cells, arrays.useful[:, None])
    rows.put(covered, columns.lacks, 1.0)
    has_batch = np.unique([due.place for due in arrays.dues]).astype(int)
    free = np.full(shape, -1)
    free[has_batch] = rows.block((len(has_batch), shape[1]), arrays.expected[has_batch], np.inf)
    of = np.flatnonzero(np.isin(place, has_batch))
    rows.put(free[place[of]], columns.cells[of], arrays.filled[of, None])
    rows.put(free[has_batch], columns.batch[has_batch], -1.0)
    rows.put(free[has_batch], columns.lacks[has_batch], 1.0)
    several = np.flatnonzero(np.bincount(place, minlength=shape[0]) > 1)
    most = np.full(shape, -1)
    bound = np.maximum(arrays.most, np.bincount(place, arrays.now, minlength=shape[0]))[several, None]
    most[several] = rows.block((len(several), shape[1]), -np.inf, bound)
    of = np.flatnonzero(np.isin(place, several))
    rows.put(most[place[of]], columns.cells[of], 1.0)


def _starts(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Cells above the previous slot were started."""
    upper = np.zeros(columns.cells.shape)
    upper[:, 0] = arrays.now
    grown = rows.block(columns.cells.shape, -np.inf, upper)
    rows.put(grown, columns.cells, 1.0)
    rows.put(grown[:, 1:], columns.cells[:, :-1], -1.0)
    rows.put(grown, columns.starts, -1.0)


def _machines(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Serving and starting cells run on machines of pools."""
    slots = arrays.view.slots
    used = rows.block((len(arrays.groups), slots), -np.inf, 0.0)
    rows.put(used[arrays.group_of], columns.cells, arrays.nodes[:, None])
    rows.put(used[arrays.pool_group], columns.machines, -1.0)
    for ahead in range(1, int(arrays.lag.max(initial=0)) + 1):
        of = np.flatnonzero(arrays.lag >= ahead)
        taken = (arrays.busy * arrays.nodes)[of, None]
        rows.put(used[arrays.group_of[of], : slots - ahead], columns.starts[of, ahead:], taken)


def _add_due_rows(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Batch work until a due plus undone work is all of it."""
    if not arrays.dues:
        return
    done = rows.block((len(arrays.dues),), np.array([due.work for due in arrays.dues]), np.inf)
    rows.put(done, columns.undone[:, 0], 1.0)
    for row, due in zip(done, arrays.dues, strict=True):
        rows.put(np.array([row]), columns.batch[due.place, : due.last + 1], 1.0)


def _upper(arrays: Arrays, columns: Columns) -> Array:
    upper = np.full(columns.count, np.inf)
    there = np.maximum(arrays.most[arrays.place_of], arrays.now)
    upper[columns.cells.ravel()] = np.repeat(there, arrays.view.slots)
    too_soon = np.arange(arrays.view.slots)[None, :] < arrays.lag[:, None]
    upper[columns.starts[too_soon]] = 0.0
    without = np.setdiff1d(np.arange(len(arrays.places)), [due.place for due in arrays.dues])
    upper[columns.batch[without].ravel()] = 0.0
    upper[columns.machines.ravel()] = arrays.room.ravel()
    return upper


def _cost(arrays: Arrays, columns: Columns) -> Array:
    cost = np.zeros(columns.count)
    cost[columns.cells.ravel()] = TINY
    cost[columns.starts] = arrays.shift[:, None]
    cost[columns.lacks] = arrays.lacking[:, None]
    cost[columns.machines] = arrays.price[:, None]
    cost[columns.undone] = arrays.lacking_batch
    return cost


def greedy_cells(arrays: Arrays) -> Array:
    cells = np.zeros((len(arrays.kinds), arrays.view.slots))
    room = arrays.room.copy()
    _cover_greedily(arrays, cells, room)
    for due in arrays.dues:
        _add(arrays, cells, room, due.place, partial(_missing_for, arrays, cells, due))
    return cells


def topped_up(arrays: Arrays, cells: Array) -> Array:
    """Adds cells for load that is uncovered although there is room. An integer program leaves a small rest if a whole
    cell costs more than the penalty."""
    cells = cells.copy()
    _cover_greedily(arrays, cells, arrays.room - pool_use(arrays, machines_of(arrays, cells)))
    return cells


def _cover_greedily(arrays: Arrays, cells: Array, room: Array) -> None:
    for place in sorted(range(len(arrays.places)), key=lambda place: (-arrays.lacking[place], place)):
        _add(arrays, cells, room, place, partial(_missing, arrays, cells, place))


def _missing(arrays: Arrays, cells: Array, place: int, kind: int) -> Array:
    of = arrays.kinds_of(place)
    rest = arrays.cover[place] - arrays.useful[of] @ cells[of]
    return np.ceil(np.maximum(rest, 0.0) / arrays.useful[kind] - ROUNDING)


def _add(arrays: Arrays, cells: Array, room: Array, place: int, wanted: Callable[[int], Array]) -> None:
    """Adds cells to a place, cheapest kind and pool first, within range and machines. In place."""
    of = arrays.kinds_of(place)
    soon = np.arange(arrays.view.slots)[None, :] < arrays.lag[of, None]
    there = np.where(soon, arrays.now[of, None], np.inf)
    for kind, pool in _cheap_first(arrays, of):
        nodes = arrays.nodes[kind]
        left = np.minimum(arrays.most[place] - cells[of].sum(axis=0), np.floor(room[pool] / nodes + ROUNDING))
        left = np.minimum(left, there[of == kind][0] - cells[kind])
        more = np.minimum(wanted(kind), np.maximum(left, 0.0))
        cells[kind] += more
        room[pool] -= more * nodes


def _cheap_first(arrays: Arrays, kinds: Array) -> list[tuple[int, int]]:
    """Kinds and their pools by cost of a request."""
    pairs = [
        (float(arrays.price[pool] * arrays.nodes[kind] / arrays.useful[kind]), int(kind), pool)
        for kind in kinds
        for pool in np.flatnonzero(arrays.pool_group == arrays.group_of[kind])
    ]
    return [(kind, int(pool)) for _, kind, pool in sorted(pairs)]


def _missing_for(arrays: Arrays, cells: Array, due: Due, kind: int) -> Array:
    """Batch work that the free capacity would not finish in time, spread evenly over all slots until then in which a
    cell can serve."""
    of = arrays.kinds_of(due.place)
    free = np.maximum(arrays.filled[of] @ cells[of] - arrays.expected[due.place], 0.0)
    missing = due.work - float(free[: due.last + 1].sum())
    first = min(int(arrays.lag[kind]), due.last)
    wanted = np.zeros(arrays.view.slots)
    if missing > ROUNDING:
        wanted[first : due.last + 1] = math.ceil(missing / (arrays.filled[kind] * (due.last + 1 - first)))
    return wanted


GAP = 1e-3
"""An integer solution within a thousandth of the optimum is accepted."""


@dataclass(frozen=True)
class Solution:
    """`values` None: no solution, with the reason in `why`."""

    values: Array | None
    why: str = ""


def solve(program: Program, *, limit_s: float, whole: bool = False) -> Solution:
    """Solves a program; `whole`: with integer columns."""
    try:
        import highspy
    except ImportError as error:
        return Solution(None, f"highspy cannot be imported: {error}")
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "time_limit": limit_s, "mip_rel_gap": GAP}
    for option, value in options.items():
        highs.setOptionValue(option, value)
    highs.passModel(_model(program, whole))
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return Solution(None, f"HiGHS answered within {limit_s:g} s: {highs.modelStatusToString(status)}")
    return Solution(np.array(highs.getSolution().col_value))


def _model(program: Program, whole: bool) -> "highspy.HighsLp":
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = (
        program.starts, program.columns, program.values
    )  # fmt: skip
    if whole:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[int(is_whole)] for is_whole in program.whole]
    return model


SETTINGS = CapacitySettings()
Solver = Callable[..., Solution]
WAYS = ("greedy", "lp", "whole")


def plan_capacity(view: CapacityView, settings: CapacitySettings = SETTINGS, solver: Solver = solve) -> CapacityPlan:
    """Returns the plan of a view. Raises ValueError if the view is invalid; the text names the part."""
    regions = {place.region for one in view.deployments for place in one.places}
    plans = {region: _plan(_of_region(view, region), settings, solver, len(regions)) for region in sorted(regions)}
    for region, moved in _views_with_helpers(plans).items():
        plans[region] = _plan(moved, settings, solver, len(regions))
    found = [plans[region] for region in sorted(plans)]
    worst = min(found, key=lambda one: WAYS.index(one.solver), default=None)
    return CapacityPlan(
        at=view.at,
        slot_s=view.slot_s,
        solver=worst.solver if worst else WAYS[-1],
        why=worst.why if worst else "",
        cells=tuple(row for plan in found for row in planned_cells(plan)),
        loads=tuple(row for plan in found for row in loads(plan)),
        budgets=tuple(row for plan in found for row in budgets(plan)),
        machines=tuple(row for plan in found for row in machines(plan)),
        orders=tuple(orders_of(found)),
        lacks=tuple(row for plan in found for row in lacks(plan)),
        dollars=tuple(round(float(slot), 4) for slot in sum((dollars(plan) for plan in found), np.zeros(view.slots))),
        shifts=sum(starts(plan) for plan in found),
        settings=settings,
    )


def _of_region(view: CapacityView, region: str) -> CapacityView:
    here = (
        replace(one, places=tuple(place for place in one.places if place.region == region)) for one in view.deployments
    )
    pools = tuple(pool for pool in view.pools if pool.region == region)
    return replace(view, deployments=tuple(one for one in here if one.places), pools=pools)


def _plan(view: CapacityView, settings: CapacitySettings, solver: Solver, regions: int) -> RegionPlan:
    """Regions share the time limits evenly, so that the total stays within them."""
    arrays = arrays_of(view, settings)
    program = program_of(arrays)
    found = solver(program, limit_s=settings.solve_s / regions)
    if found.values is None:
        return RegionPlan(arrays, bounded(arrays, greedy_cells(arrays)), "greedy", found.why)
    if len(program.cost) > settings.whole_most:
        why = f"{len(program.cost)} variables are too many for whole numbers"
        return RegionPlan(arrays, _rounded(arrays, found), "lp", why)
    whole = solver(program, limit_s=settings.whole_s / regions, whole=True)
    if whole.values is None:
        return RegionPlan(arrays, _rounded(arrays, found), "lp", whole.why)
    return RegionPlan(arrays, _rounded(arrays, whole), "whole", "")


def _rounded(arrays: Arrays, found: Solution) -> Array:
    columns = columns_of(arrays)
    values: Array = found.values
    cells = whole_cells(arrays, values[columns.cells], values[columns.batch])
    return bounded(arrays, topped_up(arrays, cells))


def _views_with_helpers(plans: Mapping[str, RegionPlan]) -> dict[str, CapacityView]:
    """Regions that cover load for which others have no machines, as new views of both: as far as machines are free,
    cheapest first."""
    moved: dict[str, CapacityView] = {}
    for region, plan in plans.items():
        missing = unserved(plan)
        for at in np.flatnonzero(missing.max(axis=1, initial=0.0) > 1e-3):
            one, _ = plan.arrays.places[at]
            for other, row in _helpers(plans, one.name, region):
                share = np.minimum(missing[at], row)
                if share.max(initial=0.0) > 1e-3:
                    missing[at] -= share
                    for place, sign in ((other, 1.0), (region, -1.0)):
                        view = moved.get(place, plans[place].arrays.view)
                        moved[place] = _with_demand(view, one.name, sign * share)
    return moved


def _helpers(plans: Mapping[str, RegionPlan], deployment: str, without: str) -> Iterator[tuple[str, Array]]:
    """Other regions of a deployment with the concurrent requests [t] that they could serve, cheapest first."""
    found = []
    for region, plan in plans.items():
        arrays = plan.arrays
        for at, (one, place) in enumerate(arrays.places):
            if region != without and one.name == deployment and place.demand is not None:
                kind = dear_first(arrays, arrays.kinds_of(at))[-1]
                soon = np.arange(arrays.view.slots) < arrays.lag[kind]
                room = np.where(soon, 0.0, spare_cells(plan, at, kind) * arrays.useful[kind])
                found.append((float(arrays.hour[arrays.group_of[kind]] * arrays.nodes[kind]), region, room))
    for _, region, room in sorted(found, key=lambda one: one[:2]):
        yield region, room


def _with_demand(view: CapacityView, deployment: str, more: Array) -> CapacityView:
    return replace(view, deployments=tuple(_changed(one, deployment, more) for one in view.deployments))


def _changed(one: PlannedDeployment, deployment: str, more: Array) -> PlannedDeployment:
    if one.name != deployment:
        return one
    return replace(one, places=tuple(replace(place, demand=_sum(place.demand, more)) for place in one.places))


def _sum(demand: Demand | None, more: Array) -> Demand | None:
    if demand is None:
        return None
    p50, p90 = (np.maximum(np.array(row[: len(more)]) + more, 0.0) for row in (demand.p50, demand.p90))
    return Demand(tuple(map(float, p50)), tuple(map(float, p90)))
