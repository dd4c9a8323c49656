"""LightGBM's correction of the blend. Pure and deterministic: one thread, fixed seeds, trees of a fixed number.

One model for a series learns, at all of `LEADS` (its trees split between them), the median of the logarithm of actual
load over the blend's forecast. So it falls back to the blend where it has learned nothing, and cannot explode: a
correction is bounded by `MOST_CORRECTION`. LightGBM is imported with the first use, by the planner's child alone.
"""

import math
from datetime import datetime

import numpy as np

from fleet.planning.forecast.methods import DAY, OFFSET, WEEK, Indices, at, blend, day_shape, last_value, mean_before
from fleet.planning.forecast.past import Floats, Past
from fleet.planning.forecast.series import LEADS, SLOT_S, SLOTS

LEAST_BLOCKS = 3 * DAY
"""Known blocks to learn from: with fewer there is no second day to be like the first one."""
TREES = 120
MOST_CORRECTION = math.log(4.0)
_SETTINGS = {
    "objective": "quantile", "alpha": 0.5, "num_leaves": 7, "learning_rate": 0.05, "min_data_in_leaf": 100,
    "feature_fraction": 0.8, "max_bin": 63, "num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 1,
    "verbose": -1,
}  # fmt: skip
_RECENT = (2, 3, 4, 8)
_WINDOWS = (4, 16, DAY)
_BEFORE_TARGET = (DAY, 2 * DAY, WEEK)
_BEFORE_ORIGIN = (DAY, WEEK)


def fit(past: Past) -> str | None:
    """The model as LightGBM's text; None: there is too little to learn from."""
    blocks = past.blocks()
    if np.count_nonzero(~np.isnan(blocks)) < LEAST_BLOCKS:
        return None
    import lightgbm

    origins, leads = np.arange(DAY, len(blocks)), np.array(LEADS)
    base = _log(blend(blocks, origins)[:, leads])
    wanted = _log(at(blocks, origins[:, None] + leads[None, :])) - base
    usable = ~np.isnan(wanted)
    rows = _features(blocks, origins, leads, past.made_at)[usable]
    data = lightgbm.Dataset(rows, wanted[usable], params=_SETTINGS)
    return str(lightgbm.train(_SETTINGS, data, TREES).model_to_string())


def corrected(past: Past, model: str) -> Floats:
    """The blend's forecast of the next `SLOTS` blocks as this model corrects it."""
    import lightgbm

    blocks = past.blocks()
    origin, leads = np.array([len(blocks)]), np.arange(SLOTS)
    rows = _features(blocks, origin, leads, past.made_at)[0]
    correction = lightgbm.Booster(model_str=model).predict(rows, num_threads=1)
    bounded = np.clip(np.asarray(correction, dtype=np.float64), -MOST_CORRECTION, MOST_CORRECTION)
    return np.exp(_log(blend(blocks, origin)[0]) + bounded) - OFFSET


def _features(blocks: Floats, origins: Indices, leads: Indices, made_at: datetime) -> Floats:
    """Origins by leads by features. Loads are logarithms, less that of the last value: a model knows no level."""
    targets = origins[:, None] + leads[None, :]
    last = _log(last_value(blocks, origins, 1))
    level = [_log(method(blocks, origins)[:, leads]) - last for method in (blend, day_shape)]
    recent = [_log(at(blocks, origins[:, None] - lag)) - last for lag in _RECENT]
    windows = [_log(mean_before(blocks, origins, width))[:, None] - last for width in _WINDOWS]
    seasons = [_log(at(blocks, targets - lag)) - last for lag in _BEFORE_TARGET]
    seasons += [_log(at(blocks, origins[:, None] - lag)) - last for lag in _BEFORE_ORIGIN]
    clock = made_at.timestamp() / SLOT_S + (targets - len(blocks))
    columns = [leads[None, :], *level, *recent, *windows, *seasons, clock % DAY, clock // DAY % 7]
    return np.stack([np.broadcast_to(column, targets.shape).astype(np.float64) for column in columns], axis=-1)


def _log(loads: Floats) -> Floats:
    return np.log(np.maximum(loads, 0.0) + OFFSET)
