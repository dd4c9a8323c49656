"""The day as a linear program: least dollars for machines, shifts and what is lacking. Rows are built with arrays, for
there are tens of thousands.

Columns, each for every slot: cells and starts of every kind; what is lacking and what batches get of every place;
machines of every pool; and for every due what of it is not done.
"""

from dataclasses import dataclass

import numpy as np

from fleet.planning.capacity.arrays import Array, Arrays

TINY = 1e-6
"""Dollars of a cell and slot, so that of plans of equal price the smallest is found."""


@dataclass(frozen=True)
class Program:
    """Least `cost @ x` of which `lower <= x <= upper` and `row_lower <= A x <= row_upper`; `A` in rows as `starts`
    (one more than rows), `columns`, `values`. `whole`: which columns should be whole numbers."""

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
    """Gathers blocks of rows as triples."""

    def __init__(self) -> None:
        self.count = 0
        self._at: list[tuple[Array, Array, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def block(self, shape: tuple[int, ...], lower: Array | float, upper: Array | float) -> Array:
        """The numbers of new rows, in this shape."""
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
    """Numbers of columns by what they are."""

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
    """In the order of `Columns`."""
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
    _due(arrays, columns, rows)
    starts, at, values = rows.matrix()
    row_lower, row_upper = rows.bounds()
    upper = _upper(arrays, columns)
    whole = np.zeros(columns.count, dtype=bool)
    whole[columns.cells[:, : arrays.settings.whole_slots].ravel()] = True
    return Program(
        _cost(arrays, columns), np.zeros(columns.count), upper, row_lower, row_upper, starts, at, values, whole
    )


def _cover(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Cells and what is lacking are what is to be covered; cells, batches aside, what is expected. Several types of a
    place are together at most what its range allows."""
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
    """What is more than a slot before was started."""
    upper = np.zeros(columns.cells.shape)
    upper[:, 0] = arrays.now
    grown = rows.block(columns.cells.shape, -np.inf, upper)
    rows.put(grown, columns.cells, 1.0)
    rows.put(grown[:, 1:], columns.cells[:, :-1], -1.0)
    rows.put(grown, columns.starts, -1.0)


def _machines(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """Cells and those that start are on machines of pools."""
    slots = arrays.view.slots
    used = rows.block((len(arrays.groups), slots), -np.inf, 0.0)
    rows.put(used[arrays.group_of], columns.cells, arrays.nodes[:, None])
    rows.put(used[arrays.pool_group], columns.machines, -1.0)
    for ahead in range(1, int(arrays.lag.max(initial=0)) + 1):
        of = np.flatnonzero(arrays.lag >= ahead)
        taken = (arrays.busy * arrays.nodes)[of, None]
        rows.put(used[arrays.group_of[of], : slots - ahead], columns.starts[of, ahead:], taken)


def _due(arrays: Arrays, columns: Columns, rows: _Rows) -> None:
    """What batches get until a due, and what is not done of it, is all of it."""
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
