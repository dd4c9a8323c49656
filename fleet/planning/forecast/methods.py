"""Forecasts from the past of a series alone, many origins at once. Pure; numpy, which web and workers do not import.

A past is an array of blocks: means of `SLOT_S` seconds, oldest first, NaN where there is a hole. A forecast of origin
`o` knows the blocks before index `o`; its lead `i` is block `o + i`. Results are arrays of origins by leads, NaN where
a method has nothing to go by. Loads are requests at once.
"""

import numpy as np
import numpy.typing as npt

from fleet.planning.forecast.past import Floats
from fleet.planning.forecast.series import SLOT_S, SLOTS

Indices = npt.NDArray[np.int64]

DAY, WEEK = SLOTS, 7 * SLOTS
OFFSET = 0.5
"""Added to loads before ratios are taken: of next to nothing, any number is a multiple."""
SHAPE_LAGS = ((DAY, 1.0), (2 * DAY, 0.6), (3 * DAY, 0.36), (WEEK, 1.0))
"""The same time on the last three days and a week ago, with their weights."""
LAST_BLOCKS = 8
"""Two hours: a last value from before says nothing of now."""
LEVEL_BLOCKS = 4
LEVEL_MOST = 5.0
LEVEL_FADES_S = 2 * 3600.0
LAST_FADES_S = 45 * 60.0


def average(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The mean of what is known of the last week."""
    return np.repeat(mean_before(past, origins, WEEK)[:, None], leads, axis=1)


def last_value(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    recent = at(past, origins[:, None] - 1 - np.arange(LAST_BLOCKS)[None, :])
    known = ~np.isnan(recent)
    first = np.argmax(known, axis=1)
    value = np.where(known.any(axis=1), recent[np.arange(len(origins)), first], np.nan)
    return np.repeat(value[:, None], leads, axis=1)


def seasonal_day(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The same time a day before."""
    return at(past, _targets(origins, leads) - DAY)


def day_shape(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The shape of a day at the level of the last hour. The level's ratio to the shape fades with two hours."""
    shape = _shape(past, _targets(origins, leads))
    return (shape + OFFSET) * _level(past, origins)[:, None] ** _fading(leads, LEVEL_FADES_S) - OFFSET


def blend(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The geometric mean of the last value, whose weight fades with 45 minutes, and of the day's shape; of these alone
    where the other has nothing to go by."""
    last, shape = last_value(past, origins, leads), day_shape(past, origins, leads)
    last, shape = np.where(np.isnan(last), shape, last), np.where(np.isnan(shape), last, shape)
    weight = _fading(leads, LAST_FADES_S)
    return (last + OFFSET) ** weight * (shape + OFFSET) ** (1 - weight) - OFFSET


def mean_before(blocks: Floats, origins: Indices, width: int) -> Floats:
    """The mean of what is known of so many blocks before each origin."""
    known = ~np.isnan(blocks)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, blocks, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first = np.maximum(origins - width, 0)
    total, count = sums[origins] - sums[first], counts[origins] - counts[first]
    means: Floats = np.divide(total, count, out=np.full(len(origins), np.nan), where=count > 0)
    return means


def _shape(past: Floats, targets: Indices) -> Floats:
    total, weights = np.zeros(targets.shape), np.zeros(targets.shape)
    for lag, weight in SHAPE_LAGS:
        before = at(past, targets - lag)
        known = ~np.isnan(before)
        total += np.where(known, weight * before, 0.0)
        weights += weight * known
    means: Floats = np.divide(total, weights, out=np.full(targets.shape, np.nan), where=weights > 0)
    return means


def _level(past: Floats, origins: Indices) -> Floats:
    """How many times the shape the last hour was; 1 where nothing can be compared."""
    indices = origins[:, None] - 1 - np.arange(LEVEL_BLOCKS)[None, :]
    seen, shape = at(past, indices), _shape(past, indices)
    known = ~(np.isnan(seen) | np.isnan(shape))
    sums = [np.where(known, each, 0.0).sum(axis=1) + OFFSET for each in (seen, shape)]
    level: Floats = np.clip(sums[0] / sums[1], 1 / LEVEL_MOST, LEVEL_MOST)
    return level


def _fading(leads: int, within_s: float) -> Floats:
    """How much of what is known now is left at each lead: 1 now, 1/e after `within_s`."""
    left: Floats = np.exp(-(np.arange(leads) + 0.5) * SLOT_S / within_s)
    return left[None, :]


def _targets(origins: Indices, leads: int) -> Indices:
    return origins[:, None] + np.arange(leads)[None, :]


def at(past: Floats, indices: Indices) -> Floats:
    """The blocks of these indices; NaN for those that are not of the past."""
    inside = (indices >= 0) & (indices < len(past))
    if not len(past):
        return np.full(indices.shape, np.nan)
    return np.where(inside, past[np.clip(indices, 0, len(past) - 1)], np.nan)
