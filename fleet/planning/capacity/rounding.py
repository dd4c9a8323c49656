"""Whole cells from parts of cells: rounded up, the dearest surplus given back; and whatever way they were found, short
dips held, and no more than ranges and machines allow.
"""

import numpy as np

from fleet.planning.capacity.arrays import HOUR_S, Array, Arrays

ROUNDING = 1e-6
DIP_MOST = 4
"""Slots: a longer dip is worth a shift, or the program would have held it."""


def whole_cells(arrays: Arrays, parts: Array, batch: Array) -> Array:
    """Cells [k, t] as whole numbers. `parts`: of cells [k, t]; `batch`: requests at once [p, t] that batches are to
    have."""
    cells = np.ceil(parts - ROUNDING)
    _give_back(arrays, cells, np.floor(parts + ROUNDING), batch)
    return cells


def bounded(arrays: Arrays, cells: Array) -> Array:
    """Cells [k, t] without what cannot be or does not pay: cells sooner than they start, short dips, more than ranges
    and machines allow."""
    soon = np.arange(arrays.view.slots)[None, :] < arrays.lag[:, None]
    cells = np.where(soon, np.minimum(cells, arrays.now[:, None]), cells)
    _hold_dips(arrays, cells)
    _fit_ranges(arrays, cells)
    _fit_machines(arrays, cells)
    return cells


def lacking(arrays: Arrays, cells: Array) -> Array:
    """Requests at once [p, t] that are to be covered and are not."""
    return np.maximum(arrays.cover - _sums(arrays, cells, arrays.useful), 0.0)


def free_for_batch(arrays: Arrays, cells: Array) -> Array:
    """Requests at once [p, t] that batches may have beside what is expected."""
    return np.maximum(_sums(arrays, cells, arrays.filled) - arrays.expected, 0.0)


def dear_first(arrays: Arrays, kinds: Array) -> Array:
    """Kinds by what a request costs on them, the dearest first."""
    per_request = arrays.hour[arrays.group_of[kinds]] * arrays.nodes[kinds] / arrays.useful[kinds]
    return kinds[np.lexsort((kinds, -per_request))]


def start_dollars(arrays: Arrays) -> Array:
    """What a start of each kind costs: its machines until it serves, and cold caches."""
    starts_h = arrays.busy * arrays.lag * arrays.view.slot_s / HOUR_S
    return starts_h * arrays.hour[arrays.group_of] * arrays.nodes + np.array([kind.lost_cache for kind in arrays.kinds])


def started(arrays: Arrays, cells: Array) -> Array:
    """Starts [k, t] whose cells serve from slot t on."""
    before = np.concatenate([arrays.now[:, None], cells[:, :-1]], axis=1)
    return np.maximum(cells - before, 0.0)


def machines_of(arrays: Arrays, cells: Array) -> Array:
    """Machines [g, t] that cells take."""
    used = np.zeros((len(arrays.groups), arrays.view.slots))
    np.add.at(used, arrays.group_of, cells * arrays.nodes[:, None])
    return used


def pool_use(arrays: Arrays, used: Array) -> Array:
    """Machines [q, t] of each pool, the cheapest first; no more than there are."""
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
    """Of what was rounded up, cells without which all is covered as before. In place."""
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


def _hold_dips(arrays: Arrays, cells: Array) -> None:
    """Hold cells through a dip where that is cheaper than to start them again. In place."""
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
    """Take away the smallest cells where kinds that were rounded up are together more than a range. In place."""
    there = np.bincount(arrays.place_of, arrays.now, minlength=len(arrays.places))
    total = _sums(arrays, cells, np.ones(len(arrays.kinds)))
    for place, slot in np.argwhere(total > np.maximum(arrays.most, there)[:, None] + ROUNDING):
        kinds = arrays.kinds_of(place)
        for _ in range(round(total[place, slot] - max(arrays.most[place], there[place]))):
            smallest = min(kinds[cells[kinds, slot] > 0], key=lambda kind: (arrays.useful[kind], kind))
            cells[smallest, slot] -= 1


def _fit_machines(arrays: Arrays, cells: Array) -> None:
    """Take away cells where there are more than machines: first those beyond what is to be covered, then those of low
    priority. In place."""
    used = machines_of(arrays, cells)
    room = np.zeros(used.shape)
    np.add.at(room, arrays.pool_group, arrays.room)
    for group, slot in np.argwhere(used > room + ROUNDING):
        over = used[group, slot] - room[group, slot]
        kinds = np.flatnonzero(arrays.group_of == group)
        while over > ROUNDING and cells[kinds, slot].any():
            kind = min(kinds[cells[kinds, slot] > 0], key=lambda one: _worth(arrays, cells, one, slot))
            cells[kind, slot] -= 1
            over -= arrays.nodes[kind]


def _worth(arrays: Arrays, cells: Array, kind: int, slot: int) -> tuple[float, int]:
    """Dollars of what would be lacking without a cell."""
    place = arrays.place_of[kind]
    of = arrays.kinds_of(place)
    room = float(arrays.useful[of] @ cells[of, slot] - arrays.cover[place, slot])
    lost = min(max(arrays.useful[kind] - room, 0.0), arrays.useful[kind])
    return lost * float(arrays.lacking[place]), int(kind)
