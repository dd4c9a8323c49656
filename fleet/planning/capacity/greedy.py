"""A plan without a solver: slot by slot the cheapest cells for what is to be covered, the most important deployments
first; then cells for batches that would not be done in what is left free. The same view has the same plan.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from fleet.planning.capacity.arrays import Array, Arrays, Due
from fleet.planning.capacity.rounding import ROUNDING, machines_of, pool_use


def greedy_cells(arrays: Arrays) -> Array:
    cells = np.zeros((len(arrays.kinds), arrays.view.slots))
    room = arrays.room.copy()
    _cover(arrays, cells, room)
    for due in arrays.dues:
        _add(arrays, cells, room, due.place, partial(_missing_for, arrays, cells, due))
    return cells


def topped_up(arrays: Arrays, cells: Array) -> Array:
    """With cells for what these leave uncovered though there is room. A program of whole numbers leaves a sliver where
    a whole cell for it is dearer than the price of what is lacking."""
    cells = cells.copy()
    _cover(arrays, cells, arrays.room - pool_use(arrays, machines_of(arrays, cells)))
    return cells


def _cover(arrays: Arrays, cells: Array, room: Array) -> None:
    for place in sorted(range(len(arrays.places)), key=lambda place: (-arrays.lacking[place], place)):
        _add(arrays, cells, room, place, partial(_missing, arrays, cells, place))


def _missing(arrays: Arrays, cells: Array, place: int, kind: int) -> Array:
    of = arrays.kinds_of(place)
    rest = arrays.cover[place] - arrays.useful[of] @ cells[of]
    return np.ceil(np.maximum(rest, 0.0) / arrays.useful[kind] - ROUNDING)


def _add(arrays: Arrays, cells: Array, room: Array, place: int, wanted: Callable[[int], Array]) -> None:
    """Add cells to a place, the cheapest kind and pool first, as far as its range and machines go. In place."""
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
    """Kinds with pools that have their machines, by what a request costs."""
    pairs = [
        (float(arrays.price[pool] * arrays.nodes[kind] / arrays.useful[kind]), int(kind), pool)
        for kind in kinds
        for pool in np.flatnonzero(arrays.pool_group == arrays.group_of[kind])
    ]
    return [(kind, int(pool)) for _, kind, pool in sorted(pairs)]


def _missing_for(arrays: Arrays, cells: Array, due: Due, kind: int) -> Array:
    """The same for batches that would not be done in time in what is free: evenly over all slots in which a cell can
    serve until then."""
    of = arrays.kinds_of(due.place)
    free = np.maximum(arrays.filled[of] @ cells[of] - arrays.expected[due.place], 0.0)
    missing = due.work - float(free[: due.last + 1].sum())
    first = min(int(arrays.lag[kind]), due.last)
    wanted = np.zeros(arrays.view.slots)
    if missing > ROUNDING:
        wanted[first : due.last + 1] = math.ceil(missing / (arrays.filled[kind] * (due.last + 1 - first)))
    return wanted
