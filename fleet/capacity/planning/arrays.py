"""A `CapacityView` as arrays (places, cell kinds and pools by slots), and the way from fractional to whole cells:
rounded up, the most expensive surplus removed, short dips held, within ranges and machines. Pure. Everything derived
from the view alone is here, so that the solver's program, the greedy plan and the repair use the same numbers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.autoscaling.planning.needs import MIN_FORECAST
from fleet.capacity.planning.view import (
    USUAL_PRIORITY,
    CapacitySettings,
    CapacityView,
    CellKind,
    Demand,
    MachinePool,
    PlannedDeployment,
    PlannedPlace,
)

Array = Any
HOUR_S = 3600.0
LATE_RESERVE = 0.1
"""Share of its time that late work must have left at the end, as in batch pacing
(`traffic.batches.planning.pacing`)."""


@dataclass(frozen=True, slots=True)
class Due:
    """Work of a place due by the end of slot `last`: the sum until then, in concurrent requests times slots."""

    place: int
    last: int
    work: float
    within_s: float


@dataclass(frozen=True)
class Arrays:
    """Axes: `p` places, `k` cell kinds of places, `q` pools, `g` regions with a type, `t` slots.

    `cover[p, t]` and `expected[p, t]`: concurrent requests to cover and expected. `place_of[k]`, `group_of[k]`,
    `pool_group[q]`: rows. `useful[k]`: concurrent real-time requests of a cell; `filled[k]`: including batches.
    `now[k]`: cells; `nodes[k]`; `lag[k]`: slots until a cell ordered now serves, of which its machines are used for the
    share `busy[k]`. `room[q, t]`: machines; `price[q]`: dollars for a machine and slot; `hour[g]`: mean dollars an hour
    for a machine of a group; `shift[k]`: dollars of a start."""

    view: CapacityView
    settings: CapacitySettings
    places: tuple[tuple[PlannedDeployment, PlannedPlace], ...]
    kinds: tuple[CellKind, ...]
    groups: tuple[tuple[str, str], ...]
    pools: tuple[MachinePool, ...]
    cover: Array
    expected: Array
    least: Array
    most: Array
    place_of: Array
    group_of: Array
    pool_group: Array
    useful: Array
    filled: Array
    now: Array
    nodes: Array
    lag: Array
    busy: Array
    room: Array
    price: Array
    hour: Array
    shift: Array
    dues: tuple[Due, ...]
    lacking: Array
    lacking_batch: float

    @property
    def slot_h(self) -> float:
        return self.view.slot_s / HOUR_S

    def kinds_of(self, place: int) -> Array:
        return np.flatnonzero(self.place_of == place)


def arrays_of(view: CapacityView, settings: CapacitySettings) -> Arrays:
    """Returns the view as arrays. Raises ValueError if a forecast is shorter than the plan, or a number is invalid."""
    places = tuple((one, place) for one in view.deployments for place in one.places)
    rows = [(at, one, place, kind) for at, (one, place) in enumerate(places) for kind in one.kinds]
    groups = tuple(sorted({(place.region, kind.instance_type) for _, _, place, kind in rows}))
    pools = tuple(pool for pool in view.pools if (pool.region, pool.instance_type) in groups)
    _check(view, rows)
    hour = np.array([_mean_price(pools, group) for group in groups])
    group_of = np.array([groups.index((place.region, kind.instance_type)) for _, _, place, kind in rows], dtype=int)
    nodes = np.array([kind.nodes for *_, kind in rows], dtype=float)
    starts_s = np.array([one.start_up_s for _, one, _, _ in rows])
    lag = np.ceil(starts_s / view.slot_s).astype(int)
    useful = np.array([one.target * kind.per_cell for _, one, _, kind in rows])
    cover, expected = (np.array(found).reshape(len(places), view.slots) for found in _demands(view, places, settings))
    dear = max((pool.price for pool in pools), default=0.0) or 1.0
    worth = float(np.max(dear * nodes / useful)) if rows else 1.0
    return Arrays(
        view,
        settings,
        places,
        tuple(kind for *_, kind in rows),
        groups,
        pools,
        cover,
        expected,
        least=np.array([place.least for _, place in places], dtype=float),
        most=np.array([place.most for _, place in places], dtype=float),
        place_of=np.array([at for at, *_ in rows], dtype=int),
        group_of=group_of,
        pool_group=np.array([groups.index((one.region, one.instance_type)) for one in pools], dtype=int),
        useful=useful,
        filled=np.array([max(settings.batch_fill, one.target) * kind.per_cell for _, one, _, kind in rows]),
        now=np.array([place.cells.get(kind.instance_type, 0) for _, _, place, kind in rows], dtype=float),
        nodes=nodes,
        lag=lag,
        busy=starts_s / np.maximum(lag * view.slot_s, 1.0),
        room=np.array([_pool_room(pool, view) for pool in pools]).reshape(len(pools), view.slots),
        price=np.array([pool.price for pool in pools]) * view.slot_s / HOUR_S,
        hour=hour,
        shift=_shifts(rows, hour[group_of] if rows else hour, nodes, starts_s),
        dues=tuple(_dues(view, places)),
        lacking=np.array([_lacking(one, worth, view, settings) for one, _ in places]),
        lacking_batch=settings.batch_price * worth * view.slot_s / HOUR_S,
    )


def _check(view: CapacityView, rows: list[tuple[int, PlannedDeployment, PlannedPlace, CellKind]]) -> None:
    for _, one, place, kind in rows:
        where = f"{one.name} in {place.region}"
        if kind.per_cell <= 0 or kind.nodes < 1 or not 0 < one.target <= 1:
            raise ValueError(f"{where}: cells take {kind.per_cell:g} requests on {kind.nodes} nodes at {one.target:g}")
        if not 0 <= place.least <= place.most:
            raise ValueError(f"{where}: {place.least} to {place.most} cells are not a range")
        demand = place.demand
        if demand and min(len(demand.p50), len(demand.p90)) < view.slots:
            raise ValueError(f"{where}: its forecast has {len(demand.p50)} slots; the plan has {view.slots}")


def _demands(
    view: CapacityView, places: tuple[tuple[PlannedDeployment, PlannedPlace], ...], settings: CapacitySettings
) -> tuple[list[Array], list[Array]]:
    """Concurrent requests to cover and expected. Places without a forecast keep their cells, within their range; their
    load is unknown, so batches get none of them."""
    cover, expected = [], []
    for one, place in places:
        demand, kinds = place.demand, {kind.instance_type: kind for kind in one.kinds}
        least = place.least * one.target * min(kind.per_cell for kind in one.kinds)
        if demand is None:
            there = sum(count * kinds[name].per_cell for name, count in place.cells.items() if name in kinds)
            cover.append(np.full(view.slots, max(least, one.target * there)))
            expected.append(np.full(view.slots, settings.batch_fill * there))
        else:
            wanted, late = covered(demand, one, view, settings), _late_batch_load(one, place, view)
            cover.append(np.maximum(least, np.where(wanted < MIN_FORECAST, 0.0, wanted) + late))
            expected.append(np.array(demand.p50[: view.slots]) + late)
    return cover, expected


def _late_batch_load(one: PlannedDeployment, place: PlannedPlace, view: CapacityView) -> Array:
    """Concurrent requests [t] that finish late batch work with a tenth of its time left, from when a cell ordered now
    serves."""
    row = np.zeros(view.slots)
    for due in (due for due in place.batch if due.is_late):
        last = min(view.slots, max(1, int((1 - LATE_RESERVE) * due.within_s // view.slot_s)))
        first = min(math.ceil(one.start_up_s / view.slot_s), last - 1)
        share = min(1.0, view.slots * view.slot_s / max(due.within_s, view.slot_s))  # continues after the plan
        row[first:last] += share * due.work / ((last - first) * view.slot_s)
    return row


def covered(demand: Demand, one: PlannedDeployment, view: CapacityView, settings: CapacitySettings) -> Array:
    """Concurrent requests to cover at the target, slot by slot: the expected load, and p90 with cells filled to
    `surge_fill` over one start-up and slot. Later slots are planned again before they must be ordered: they are covered
    with today's near margin, up to their own p90."""
    p50 = np.array(demand.p50[: view.slots])
    fuller = min(1.0, one.target / settings.surge_fill)
    p90 = np.maximum(p50, np.array(demand.p90[: view.slots]) * fuller)
    near = min(view.slots, math.ceil((one.start_up_s + view.slot_s) / view.slot_s) + 1)
    margin = float(np.max(p90[:near] / np.maximum(p50[:near], 1e-9))) if p50[:near].max() > 0 else np.inf
    later = np.minimum(p90, np.maximum(p50, p50 * margin)) if np.isfinite(margin) else p90
    return np.concatenate([p90[:near], later[near:]])


def _pool_room(pool: MachinePool, view: CapacityView) -> Array:
    begins = np.arange(view.slots) * view.slot_s
    usable = (begins >= pool.from_s) & (begins + view.slot_s <= pool.until_s)
    return np.where(usable, float(pool.count), 0.0)


def _mean_price(pools: tuple[MachinePool, ...], group: tuple[str, str]) -> float:
    own = [pool for pool in pools if (pool.region, pool.instance_type) == group]
    return sum(pool.price * pool.count for pool in own) / max(1, sum(pool.count for pool in own))


def _shifts(
    rows: list[tuple[int, PlannedDeployment, PlannedPlace, CellKind]], hour: Array, nodes: Array, starts_s: Array
) -> Array:
    """Cost of a start besides machines: cold caches, and a small penalty so that of equal plans the one with fewer
    starts is found."""
    cold = np.array([kind.lost_cache for *_, kind in rows])
    return cold + 1e-3 * np.maximum(hour * nodes * starts_s / HOUR_S, 1e-3)


def _dues(view: CapacityView, places: tuple[tuple[PlannedDeployment, PlannedPlace], ...]) -> list[Due]:
    found = []
    for at, (_, place) in enumerate(places):
        if place.demand is None:
            continue
        total, by_last = 0.0, {}
        for work in sorted((one for one in place.batch if not one.is_late), key=lambda one: one.within_s):
            last = min(max(int(work.within_s // view.slot_s) - 1, 0), view.slots - 1)
            share = min(1.0, view.slots * view.slot_s / work.within_s) if work.within_s > 0 else 1.0
            total += share * work.work / view.slot_s  # work due after the plan is spread evenly
            by_last[last] = (total, work.within_s)
        found += [Due(at, last, work, within_s) for last, (work, within_s) in by_last.items()]
    return found


def _lacking(one: PlannedDeployment, worth: float, view: CapacityView, settings: CapacitySettings) -> float:
    steps = max(-8, min(8, one.priority - USUAL_PRIORITY))
    return settings.realtime_price * worth * view.slot_s / HOUR_S * 2.0**steps


ROUNDING = 1e-6
DIP_MOST = 4
"""Slots. Longer dips are worth a restart, or the program would have held them."""


def whole_cells(arrays: Arrays, parts: Array, batch: Array) -> Array:
    """Returns whole cells [k, t]. `parts`: fractional cells [k, t]; `batch`: concurrent requests [p, t] for batches."""
    cells = np.ceil(parts - ROUNDING)
    _give_back(arrays, cells, np.floor(parts + ROUNDING), batch)
    return cells


def bounded(arrays: Arrays, cells: Array) -> Array:
    """Returns cells [k, t] within start-up times, ranges and machines, and without short dips."""
    soon = np.arange(arrays.view.slots)[None, :] < arrays.lag[:, None]
    cells = np.where(soon, np.minimum(cells, arrays.now[:, None]), cells)
    _bridge_dips(arrays, cells)
    _fit_ranges(arrays, cells)
    _fit_machines(arrays, cells)
    return cells


def lacking(arrays: Arrays, cells: Array) -> Array:
    """Concurrent requests [p, t] to cover without a cell."""
    return np.maximum(arrays.cover - _sums(arrays, cells, arrays.useful), 0.0)


def free_for_batch(arrays: Arrays, cells: Array) -> Array:
    """Concurrent requests [p, t] for batches besides the expected load."""
    return np.maximum(_sums(arrays, cells, arrays.filled) - arrays.expected, 0.0)


def dear_first(arrays: Arrays, kinds: Array) -> Array:
    """Kinds by cost of a request, most expensive first."""
    per_request = arrays.hour[arrays.group_of[kinds]] * arrays.nodes[kinds] / arrays.useful[kinds]
    return kinds[np.lexsort((kinds, -per_request))]


def start_dollars(arrays: Arrays) -> Array:
    """Cost of a start of each kind: its machines until it serves, and cold caches."""
    starts_h = arrays.busy * arrays.lag * arrays.view.slot_s / HOUR_S
    return starts_h * arrays.hour[arrays.group_of] * arrays.nodes + np.array([kind.lost_cache for kind in arrays.kinds])


def started(arrays: Arrays, cells: Array) -> Array:
    """Starts [k, t] whose cells serve from slot t on."""
    before = np.concatenate([arrays.now[:, None], cells[:, :-1]], axis=1)
    return np.maximum(cells - before, 0.0)


def machines_of(arrays: Arrays, cells: Array) -> Array:
    used = np.zeros((len(arrays.groups), arrays.view.slots))
    np.add.at(used, arrays.group_of, cells * arrays.nodes[:, None])
    return used


def pool_use(arrays: Arrays, used: Array) -> Array:
    """Machines [q, t] of each pool, cheapest first, within its size."""
    left, taken = used.copy(), np.zeros((len(arrays.pools), arrays.view.slots))
    for pool in sorted(range(len(arrays.pools)), key=lambda one: (arrays.price[one], one)):
        group = arrays.pool_group[pool]
        taken[pool] = np.minimum(left[group], arrays.room[pool])
        left[group] -= taken[pool]
    return taken


def _sums(arrays: Arrays, cells: Array, each: Array) -> Array:
    total = np.zeros(arrays.cover.shape)
    np.add.at(total, arrays.place_of, cells * each[:, None])
    return total


def _give_back(arrays: Arrays, cells: Array, least: Array, batch: Array) -> None:
    """Removes surplus cells of rounding. In place."""
    for place in range(len(arrays.places)):
        kinds = arrays.kinds_of(place)
        if len(kinds) < 2:
            continue
        room = (arrays.useful[kinds, None] * cells[kinds]).sum(axis=0) - arrays.cover[place]
        free = (arrays.filled[kinds, None] * cells[kinds]).sum(axis=0) - arrays.expected[place] - batch[place]
        beyond = cells[kinds].sum(axis=0) - arrays.least[place]
        for kind in dear_first(arrays, kinds):
            spare = np.minimum(room / arrays.useful[kind], free / arrays.filled[kind])
            back = np.floor(np.minimum(spare, beyond) + ROUNDING).clip(0, cells[kind] - least[kind])
            cells[kind] -= back
            room, free, beyond = room - back * arrays.useful[kind], free - back * arrays.filled[kind], beyond - back


def _bridge_dips(arrays: Arrays, cells: Array) -> None:
    """Keeps cells through a dip if that is cheaper than a restart. In place."""
    a_slot = arrays.hour[arrays.group_of] * arrays.nodes * arrays.slot_h
    shift = start_dollars(arrays)
    for length in range(1, DIP_MOST + 1):
        for kind in np.flatnonzero(length * a_slot <= shift):
            row = cells[kind]
            for begin in range(1, len(row) - length):
                sides = min(row[begin - 1], row[begin + length])
                if row[begin : begin + length].max() < sides:
                    row[begin : begin + length] = sides


def _fit_ranges(arrays: Arrays, cells: Array) -> None:
    """Removes the smallest cells of kinds that exceed a range after rounding. In place."""
    there = np.bincount(arrays.place_of, arrays.now, minlength=len(arrays.places))
    total = _sums(arrays, cells, np.ones(len(arrays.kinds)))
    for place, slot in np.argwhere(total > np.maximum(arrays.most, there)[:, None] + ROUNDING):
        kinds = arrays.kinds_of(place)
        for _ in range(round(total[place, slot] - max(arrays.most[place], there[place]))):
            smallest = min(kinds[cells[kinds, slot] > 0], key=lambda kind: (arrays.useful[kind], kind))
            cells[smallest, slot] -= 1


def _fit_machines(arrays: Arrays, cells: Array) -> None:
    """Removes cells beyond the machines: first surplus ones, then those of low priority. In place."""
    used = machines_of(arrays, cells)
    room = np.zeros(used.shape)
    np.add.at(room, arrays.pool_group, arrays.room)
    for group, slot in np.argwhere(used > room + ROUNDING):
        over = used[group, slot] - room[group, slot]
        kinds = np.flatnonzero(arrays.group_of == group)
        while over > ROUNDING and cells[kinds, slot].any():
            kind = min(kinds[cells[kinds, slot] > 0], key=lambda one: _cell_worth(arrays, cells, one, slot))
            cells[kind, slot] -= 1
            over -= arrays.nodes[kind]


def _cell_worth(arrays: Arrays, cells: Array, kind: int, slot: int) -> tuple[float, int]:
    """Dollars of the load that a cell covers."""
    place = arrays.place_of[kind]
    of = arrays.kinds_of(place)
    room = float(arrays.useful[of] @ cells[of, slot] - arrays.cover[place, slot])
    lost = min(max(arrays.useful[kind] - room, 0.0), arrays.useful[kind])
    return lost * float(arrays.lacking[place]), int(kind)
