"""What whole cells of a region lead to: batch budgets, machines of pools, dollars, uncovered load with its reasons, and
the orders from slot to slot (moved nodes, started and stopped cells, launched and released machines). Pure; the planner
combines regions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.capacity.planning.arrays import (
    ROUNDING,
    Array,
    Arrays,
    Due,
    free_for_batch,
    lacking,
    machines_of,
    pool_use,
    start_dollars,
    started,
)
from fleet.capacity.planning.view import BatchBudget, Lack, Order, PlannedCells, PlannedLoad, PlannedMachines


@dataclass(frozen=True)
class RegionPlan:
    """Whole cells [k, t] of a region, and the solver."""

    arrays: Arrays
    cells: Array
    solver: str
    why: str


def planned_cells(plan: RegionPlan) -> Iterator[PlannedCells]:
    for kind, of, row in zip(plan.arrays.kinds, plan.arrays.place_of, plan.cells, strict=True):
        one, place = plan.arrays.places[of]
        yield PlannedCells(one.name, place.region, kind.instance_type, tuple(int(count) for count in row))


def loads(plan: RegionPlan) -> Iterator[PlannedLoad]:
    for at, (one, place) in enumerate(plan.arrays.places):
        expected, cover = (_rounded(rows[at]) for rows in (plan.arrays.expected, plan.arrays.cover))
        yield PlannedLoad(one.name, place.region, expected, cover, one.start_up_s)


def budgets(plan: RegionPlan) -> Iterator[BatchBudget]:
    """Places without a forecast have none."""
    free = free_for_batch(plan.arrays, plan.cells)
    for at, (one, place) in enumerate(plan.arrays.places):
        if place.demand is not None:
            due = _used(plan.arrays, at, free[at])[0]
            yield BatchBudget(one.name, place.region, _rounded(free[at]), _rounded(due))


def machines(plan: RegionPlan) -> Iterator[PlannedMachines]:
    """Cheapest pools first. Starting cells use their machines from the previous slot."""
    used = pool_use(plan.arrays, _machines_used(plan.arrays, plan.cells))
    for pool, row in zip(plan.arrays.pools, used, strict=True):
        yield PlannedMachines(pool.region, pool.instance_type, pool.name, tuple(int(count) for count in row))


def dollars(plan: RegionPlan) -> Array:
    """Cost of each slot: machines of serving cells, and starts."""
    arrays = plan.arrays
    rent: Array = arrays.price @ pool_use(arrays, machines_of(arrays, plan.cells))
    return rent + start_dollars(arrays) @ started(arrays, plan.cells)


def starts(plan: RegionPlan) -> int:
    return int(started(plan.arrays, plan.cells).sum())


def lacks(plan: RegionPlan) -> Iterator[Lack]:
    """Uncovered load, one for each place; unfinished batch work, one for each due."""
    arrays, free = plan.arrays, free_for_batch(plan.arrays, plan.cells)
    missing = lacking(arrays, plan.cells)
    for at, (one, place) in enumerate(arrays.places):
        row = missing[at]
        if (slots := np.flatnonzero(row > 1e-3)).size:
            later = slots[slots >= arrays.lag[arrays.kinds_of(at)].min()]
            lasting = later if later.size else slots  # skips load for which no cell could have been started
            worst = int(lasting[np.argmax(row[lasting])])
            reason = _lack_reason(plan, at, worst)
            yield Lack(
                one.name,
                place.region,
                "realtime",
                float(slots[0] * arrays.view.slot_s),
                round(float(row[worst]), 2),
                reason,
                int(slots.size) * arrays.view.slot_s,
            )
        undone = _used(arrays, at, free[at])[1]
        for due, work in undone:
            share = f"{work / due.work:.0%}" if due.work else "none"
            reason = f"{share} of the work due then has no room; {_lack_reason(plan, at, due.last)}"
            mean = round(work / (due.last + 1), 2)
            yield Lack(one.name, place.region, "batch", due.within_s, mean, reason, (due.last + 1) * arrays.view.slot_s)


def unserved(plan: RegionPlan) -> Array:
    """Concurrent requests [p, t] without a cell, although cells could have started by then."""
    missing = lacking(plan.arrays, plan.cells)
    soon = np.zeros(len(plan.arrays.places))
    np.maximum.at(soon, plan.arrays.place_of, plan.arrays.lag)
    missing[np.arange(plan.arrays.view.slots)[None, :] < soon[:, None]] = 0.0
    return missing


def spare_cells(plan: RegionPlan, place: int, kind: int) -> Array:
    """Cells [t] that range and machines still allow."""
    arrays = plan.arrays
    left = np.floor(_room_left(plan, arrays.group_of[kind]) / arrays.nodes[kind] + ROUNDING)
    there = plan.cells[arrays.kinds_of(place)].sum(axis=0)
    free: Array = np.maximum(np.minimum(left, arrays.most[place] - there), 0.0)
    return free


def _lack_reason(plan: RegionPlan, place: int, slot: int) -> str:
    arrays = plan.arrays
    of = arrays.kinds_of(place)
    _, stated = arrays.places[place]
    if plan.cells[of, slot].sum() >= arrays.most[place]:
        return f"its {'budget covers' if stated.is_bound_by_budget else 'range ends at'} {stated.most}"
    groups = set(arrays.group_of[of])
    if slot < arrays.lag[of].min() and any(_room_left(plan, group)[slot] >= arrays.nodes[of].min() for group in groups):
        return f"a cell ordered now serves in {arrays.places[place][0].start_up_s:.0f} s"
    types = ", ".join(arrays.kinds[kind].instance_type for kind in of)
    count = int(sum(arrays.room[pool, slot] for pool, group in enumerate(arrays.pool_group) if group in groups))
    return f"{stated.region} has {count} machines of {types} then, all in use"


def _room_left(plan: RegionPlan, group: int) -> Array:
    arrays, of_group = plan.arrays, plan.arrays.group_of == group
    left: Array = arrays.room[arrays.pool_group == group].sum(axis=0) - arrays.nodes[of_group] @ plan.cells[of_group]
    return left


def _used(arrays: Arrays, place: int, free: Array) -> tuple[Array, list[tuple[Due, float]]]:
    """What due batches take of `free` [t], as early as possible, and what remains undone."""
    left, taken, before, undone = free.copy(), np.zeros(free.shape), 0.0, []
    for due in (due for due in arrays.dues if due.place == place):
        wanted = due.work - before
        before = due.work
        sums = np.cumsum(left[: due.last + 1])
        took = np.diff(np.minimum(sums, wanted), prepend=0.0)
        taken[: due.last + 1] += took
        left[: due.last + 1] -= took
        if wanted - took.sum() > 1e-3 * max(wanted, 1.0):
            undone.append((due, float(wanted - took.sum())))
    return taken, undone


def _machines_used(arrays: Arrays, cells: Array) -> Array:
    """Machines [g, t] of serving and starting cells."""
    busy = cells.copy()
    begun = started(arrays, cells)
    for ahead in range(1, int(arrays.lag.max(initial=0)) + 1):
        of = np.flatnonzero(arrays.lag >= ahead)
        busy[of, :-ahead] += begun[of, ahead:]
    return machines_of(arrays, busy)


def _rounded(row: Array) -> tuple[float, ...]:
    return tuple(round(float(value), 2) for value in row)


ORDERED_SLOTS = 8
"""Later slots are planned again before they are ordered."""


@dataclass(slots=True)
class _Change:
    """Additional cells of a kind in a slot. `shift`: dollars of a start; `hour`: of machines."""

    deployment: str
    region: str
    instance_type: str
    nodes: int
    count: int
    shift: float
    hour: float
    start_up_s: float
    reason: str


def orders_of(plans: Sequence[RegionPlan]) -> Iterator[Order]:
    if not plans:
        return
    view = plans[0].arrays.view
    for slot in range(min(ORDERED_SLOTS, view.slots)):
        changes = [change for plan in plans for change in _changes(plan, slot)]
        yield from _cell_orders(changes, float(slot * view.slot_s))
        for plan in plans:
            yield from _machine_orders(plan, slot)


def _changes(plan: RegionPlan, slot: int) -> Iterator[_Change]:
    arrays = plan.arrays
    before = plan.cells[:, slot - 1] if slot else arrays.now
    shifts = start_dollars(arrays)
    for kind, count in enumerate(plan.cells[:, slot] - before):
        if count:
            one, place = arrays.places[arrays.place_of[kind]]
            hour = float(arrays.hour[arrays.group_of[kind]] * arrays.nodes[kind])
            yield _Change(
                one.name,
                place.region,
                arrays.kinds[kind].instance_type,
                int(arrays.nodes[kind]),
                int(count),
                float(shifts[kind]),
                hour,
                one.start_up_s,
                _reason(plan, kind, slot),
            )


def _reason(plan: RegionPlan, kind: int, slot: int) -> str:
    arrays = plan.arrays
    place = arrays.place_of[kind]
    of = arrays.kinds_of(place)
    there = int(plan.cells[of, slot].sum())
    cover, expected = float(arrays.cover[place, slot]), float(arrays.expected[place, slot])
    cells = f"{there} cell{'' if there == 1 else 's'}"
    room = float(arrays.useful[of] @ plan.cells[of, slot])
    if arrays.places[place][1].demand is None:
        return "its load has no forecast"
    if room - cover >= float(arrays.useful[of].min()) and any(due.place == place for due in arrays.dues):
        return f"{expected:.1f} concurrent requests are expected, and due batches use the rest of {cells}"
    return f"{expected:.1f} concurrent requests are expected; {cells} must cover {cover:.1f}"


def _cell_orders(changes: list[_Change], at_s: float) -> Iterator[Order]:
    """Nodes move first within a region and type, then to another type, then to another region."""
    more, fewer = ([one for one in changes if (one.count > 0) is grows] for grows in (True, False))
    for same in (("region", "instance_type"), ("deployment", "region"), ("deployment",)):
        for gains in more:
            for gives in fewer:
                if all(getattr(gains, name) == getattr(gives, name) for name in same):
                    yield from _move(gains, gives, at_s)
    for one in more:
        if one.count:
            begins_s = max(0.0, at_s - one.start_up_s)
            hours = one.count * (one.shift + one.hour)
            yield _order(one, "start", begins_s, one.count, hours)
    for one in fewer:
        if one.count:
            yield _order(one, "stop", at_s, -one.count, one.count * one.hour)


def _move(gains: _Change, gives: _Change, at_s: float) -> Iterator[Order]:
    """As many whole cells as the released nodes allow."""
    count = min(gains.count, -gives.count * gives.nodes // gains.nodes)
    if count <= 0:
        return
    gains.count -= count
    gives.count += -(-count * gains.nodes // gives.nodes)
    taken_from = f"{gives.deployment} in {gives.region} on {gives.instance_type}"
    begins_s = max(0.0, at_s - gains.start_up_s)
    reason = f"{gains.reason}; {gives.deployment} in {gives.region}: {gives.reason}"
    price = count * (gains.shift + gains.hour - gives.hour * gains.nodes / gives.nodes)
    yield Order(
        begins_s,
        "move",
        gains.deployment,
        gains.region,
        gains.instance_type,
        count,
        round(price, 4),
        reason,
        taken_from,
    )


def _order(one: _Change, kind: str, at_s: float, count: int, dollars: float) -> Order:
    return Order(at_s, kind, one.deployment, one.region, one.instance_type, count, round(dollars, 4), one.reason)


def _machine_orders(plan: RegionPlan, slot: int) -> Iterator[Order]:
    arrays = plan.arrays
    for pool, row in zip(arrays.pools, machines(plan), strict=True):
        before = row.machines[slot - 1] if slot else pool.now
        count = row.machines[slot] - before
        if count:
            kind = "launch" if count > 0 else "give_back"
            what = "more" if count > 0 else "fewer"
            reason = f"cells take {row.machines[slot]} of {pool.name}, {abs(count)} {what} than before"
            at_s = float(slot * arrays.view.slot_s)
            hour = round(count * pool.price, 4)
            yield Order(at_s, kind, "", pool.region, pool.instance_type, abs(count), hour, reason, pool.name)
