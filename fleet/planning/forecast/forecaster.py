"""Forecasts a series with every method and issues the one that the error ledger has chosen. Pure; numpy.

Every forecast is finite, whatever the history lacks: a method without the data that it needs gives way to the blend,
then to the last value, then to the average. A series without data for a week has no forecast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fleet.planning.forecast.methods import average, blend, day_shape, last_value, seasonal_day
from fleet.planning.forecast.past import Floats, Past
from fleet.planning.forecast.records import SCORES_LEAST, UNKNOWN_FACTORS, Calibration, Record
from fleet.planning.forecast.series import LEADS, SLOT_S, SLOTS, Forecast, Method, horizon_of

_IN_PLACE = (Method.BLEND.value, Method.LAST.value, Method.AVERAGE.value)


@dataclass(frozen=True, slots=True)
class Made:
    """A forecast, its p99 and the record for the ledger. `is_judged`: the quantiles rest on errors that were seen."""

    forecast: Forecast
    p99: tuple[float, ...]
    record: Record
    is_judged: bool


def forecast_series(past: Past, calibration: Calibration) -> Made | None:
    """The forecast of the next day. Returns None if nothing is known of the last week."""
    by_method = _by_method(past)
    if not np.isfinite(by_method[Method.AVERAGE.value]).all():
        return None
    chosen = tuple(_method_of(by_method, calibration, slot) for slot in range(SLOTS))
    p50 = [float(by_method[method][slot]) for slot, method in enumerate(chosen)]
    factors = [_factors(calibration, method, horizon_of(slot)) for slot, method in enumerate(chosen)]
    p90, p99 = (
        tuple(_raised(load, of[rank]) for load, of in zip(p50, factors, strict=True))
        for rank in range(len(UNKNOWN_FACTORS))
    )
    forecast = Forecast(past.key, past.made_at, SLOT_S, tuple(round(load, 3) for load in p50), p90, chosen)
    return Made(forecast, p99, _record(past, by_method, calibration), _is_judged(chosen[0], calibration))


def _by_method(past: Past) -> dict[str, Floats]:
    """The next `SLOTS` blocks of each method, none below zero."""
    blocks = past.blocks()
    origin = np.array([len(blocks)])
    methods = {
        Method.AVERAGE: average, Method.LAST: last_value, Method.SEASONAL: seasonal_day, Method.SHAPE: day_shape,
        Method.BLEND: blend,
    }  # fmt: skip
    return {method.value: np.maximum(method_of(blocks, origin)[0], 0.0) for method, method_of in methods.items()}


def _method_of(by_method: Mapping[str, Floats], calibration: Calibration, slot: int) -> str:
    horizon = horizon_of(slot)
    first = calibration.chosen[horizon : horizon + 1]
    return next(
        method for method in (*first, *_IN_PLACE) if method in by_method and np.isfinite(by_method[method][slot])
    )


def _is_judged(method: str, calibration: Calibration) -> bool:
    """By the errors of the next quarter of an hour, which are the first to be known."""
    scores = calibration.scores.get(method, ())
    return bool(scores) and scores[0].count >= SCORES_LEAST


def _factors(calibration: Calibration, method: str, horizon: int) -> tuple[float, ...]:
    scores = calibration.scores.get(method, ())
    return scores[horizon].factors if horizon < len(scores) else UNKNOWN_FACTORS


def _raised(load: float, factor: float) -> float:
    return round(load * factor, 3)


def _record(past: Past, by_method: Mapping[str, Floats], calibration: Calibration) -> Record:
    p50 = {
        method: tuple(round(float(loads[lead]), 3) for lead in LEADS)
        for method, loads in by_method.items()
        if np.isfinite(loads[list(LEADS)]).all()
    }
    p90 = {
        method: tuple(_raised(load, _factors(calibration, method, horizon)[0]) for horizon, load in enumerate(loads))
        for method, loads in p50.items()
    }
    return Record(past.made_at, p50, p90)
