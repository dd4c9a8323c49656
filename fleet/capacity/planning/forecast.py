"""Forecasts of load series for the next day, and the error ledger that chooses their methods. Pure; needs numpy, so web
and workers must not import it. History has slots of `HISTORY_SLOT_S` seconds, oldest first, ending when the forecast is
made; methods use blocks of `SLOT_S` with the same end, so that a day is a whole number of blocks. Missing blocks are
NaN. A forecast of origin `o` uses blocks before `o`; its lead `i` is block `o + i`. A method without the data that it
needs gives way to the blend, the last value, then the average, so that every forecast is finite. The ledger compares
methods by their stored forecasts (`Record`), never by refitting the past, and only over records that both have."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt

from fleet.capacity.planning.forecast_series import (
    HISTORY_SLOT_S,
    LEADS,
    QUANTILES,
    SCORES_LEAST,
    SLOT_S,
    SLOTS,
    UNKNOWN_FACTORS,
    Calibration,
    Forecast,
    Method,
    Record,
    Score,
    SeriesKey,
    horizon_of,
)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
SLOTS_PER_BLOCK = SLOT_S // HISTORY_SLOT_S
KNOWN_LEAST = 2
"""Known slots that make a block known."""


@dataclass(frozen=True, slots=True)
class Past:
    """`slots`: concurrent requests; NaN for holes."""

    key: SeriesKey
    made_at: datetime
    slots: Floats

    def blocks(self) -> Floats:
        """Means of each block's known slots."""
        count = len(self.slots) // SLOTS_PER_BLOCK
        return _means(self.slots[len(self.slots) - count * SLOTS_PER_BLOCK :].reshape(count, SLOTS_PER_BLOCK))

    def block_from(self, starts_at: datetime) -> float:
        """Mean of the block that began then; NaN if unknown or unfinished."""
        ago = round((self.made_at - starts_at).total_seconds() / HISTORY_SLOT_S)
        first = len(self.slots) - ago
        if ago < SLOTS_PER_BLOCK or first < 0:
            return float("nan")
        return float(_means(self.slots[None, first : first + SLOTS_PER_BLOCK])[0])


def past_of(key: SeriesKey, made_at: datetime, slots: Floats) -> Past:
    return Past(key, made_at, np.where(np.isfinite(slots) & (slots >= 0), slots, np.nan))


def _means(rows: Floats) -> Floats:
    known = ~np.isnan(rows)
    counts = known.sum(axis=1)
    sums = np.where(known, rows, 0.0).sum(axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts >= KNOWN_LEAST)
    return means


Indices = npt.NDArray[np.int64]

DAY, WEEK = SLOTS, 7 * SLOTS
OFFSET = 0.5
"""Added to loads before ratios, because ratios of tiny loads are meaningless."""
SHAPE_LAGS = ((DAY, 1.0), (2 * DAY, 0.6), (3 * DAY, 0.36), (WEEK, 1.0))
"""The same time on the last three days and a week ago, with weights."""
LAST_BLOCKS = 8
"""Two hours: older last values say nothing about now."""
LEVEL_BLOCKS = 4
LEVEL_MOST = 5.0
LEVEL_FADES_S = 2 * 3600.0
LAST_FADES_S = 45 * 60.0


def average(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    return np.repeat(mean_before(past, origins, WEEK)[:, None], leads, axis=1)


def last_value(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    recent = at(past, origins[:, None] - 1 - np.arange(LAST_BLOCKS)[None, :])
    known = ~np.isnan(recent)
    first = np.argmax(known, axis=1)
    value = np.where(known.any(axis=1), recent[np.arange(len(origins)), first], np.nan)
    return np.repeat(value[:, None], leads, axis=1)


def seasonal_day(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The same time on the previous day."""
    return at(past, _targets(origins, leads) - DAY)


def day_shape(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """The shape of a day at the level of the last hour. The ratio of level to shape decays with two hours."""
    shape = _shape(past, _targets(origins, leads))
    return (shape + OFFSET) * _level(past, origins)[:, None] ** _fading(leads, LEVEL_FADES_S) - OFFSET


def blend(past: Floats, origins: Indices, leads: int = SLOTS) -> Floats:
    """Geometric mean of the last value, whose weight decays with 45 minutes, and the day's shape; one alone if the
    other has no data."""
    last, shape = last_value(past, origins, leads), day_shape(past, origins, leads)
    last, shape = np.where(np.isnan(last), shape, last), np.where(np.isnan(shape), last, shape)
    weight = _fading(leads, LAST_FADES_S)
    return (last + OFFSET) ** weight * (shape + OFFSET) ** (1 - weight) - OFFSET


def mean_before(blocks: Floats, origins: Indices, width: int) -> Floats:
    """Mean of the known blocks among the `width` blocks before each origin."""
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
    """Ratio of the last hour to the shape; 1 if not comparable."""
    indices = origins[:, None] - 1 - np.arange(LEVEL_BLOCKS)[None, :]
    seen, shape = at(past, indices), _shape(past, indices)
    known = ~(np.isnan(seen) | np.isnan(shape))
    sums = [np.where(known, each, 0.0).sum(axis=1) + OFFSET for each in (seen, shape)]
    level: Floats = np.clip(sums[0] / sums[1], 1 / LEVEL_MOST, LEVEL_MOST)
    return level


def _fading(leads: int, within_s: float) -> Floats:
    """Decay at each lead: 1 now, 1/e after `within_s`."""
    left: Floats = np.exp(-(np.arange(leads) + 0.5) * SLOT_S / within_s)
    return left[None, :]


def _targets(origins: Indices, leads: int) -> Indices:
    return origins[:, None] + np.arange(leads)[None, :]


def at(past: Floats, indices: Indices) -> Floats:
    """Blocks of these indices; NaN outside the past."""
    inside = (indices >= 0) & (indices < len(past))
    if not len(past):
        return np.full(indices.shape, np.nan)
    return np.where(inside, past[np.clip(indices, 0, len(past) - 1)], np.nan)


_IN_PLACE = (Method.BLEND.value, Method.LAST.value, Method.AVERAGE.value)


@dataclass(frozen=True, slots=True)
class Made:
    """A forecast, its p99, and the record for the ledger. `is_judged`: the quantiles come from observed errors."""

    forecast: Forecast
    p99: tuple[float, ...]
    record: Record
    is_judged: bool


def forecast_series(past: Past, calibration: Calibration) -> Made | None:
    """Returns the forecast of the next day; None without data in the last week."""
    by_method = _by_method(past)
    if not np.isfinite(by_method[Method.AVERAGE.value]).all():
        return None
    chosen = tuple(_method_of(by_method, calibration, slot) for slot in range(SLOTS))
    p50 = [float(by_method[method][slot]) for slot, method in enumerate(chosen)]
    factors = [_factors_of_method(calibration, method, horizon_of(slot)) for slot, method in enumerate(chosen)]
    p90, p99 = (
        tuple(_raised(load, of[rank]) for load, of in zip(p50, factors, strict=True))
        for rank in range(len(UNKNOWN_FACTORS))
    )
    forecast = Forecast(past.key, past.made_at, SLOT_S, tuple(round(load, 3) for load in p50), p90, chosen)
    return Made(forecast, p99, _record(past, by_method, calibration), _is_judged(chosen[0], calibration))


def _by_method(past: Past) -> dict[str, Floats]:
    """The next `SLOTS` blocks of each method, at least 0."""
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
    """By the errors of the next quarter of an hour, which are known first."""
    scores = calibration.scores.get(method, ())
    return bool(scores) and scores[0].count >= SCORES_LEAST


def _factors_of_method(calibration: Calibration, method: str, horizon: int) -> tuple[float, ...]:
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
        method: tuple(
            _raised(load, _factors_of_method(calibration, method, horizon)[0]) for horizon, load in enumerate(loads)
        )
        for method, loads in p50.items()
    }
    return Record(past.made_at, p50, p90)


SCORED_FOR = timedelta(days=7)
"""Older records do not count for the choice of a method."""
RATIOS_FOR = timedelta(days=3)
"""Quantiles follow recent errors."""
SCORES_A_SLOT = 1.5
"""Additional records for each slot ahead, because overlapping forecasts have related errors. With one record each half
hour, three horizons."""
MARGIN = 0.03
"""A method takes over only if it is better by this much; beyond `NEAR_SLOTS` times the root of the hours ahead, because
a week has fewer independent errors at long horizons."""
NEAR_SLOTS = 16


@dataclass(frozen=True, slots=True)
class _Errors:
    """Forecasts and actual loads of one method at one horizon, a row for each record; NaN if unknown."""

    p50: Floats
    p90: Floats
    actual: Floats
    recent: Flags

    @property
    def known(self) -> Flags:
        return ~(np.isnan(self.p50) | np.isnan(self.actual))


def calibrate(past: Past, records: Iterable[Record], before: Calibration) -> Calibration:
    """Returns the ledger as of the end of the past."""
    judged = sorted(
        (one for one in records if past.made_at - SCORED_FOR <= one.made_at < past.made_at), key=lambda one: one.made_at
    )
    chosen: list[str] = []
    scores: dict[str, list[Score]] = {method.value: [] for method in Method}
    for horizon in range(len(LEADS)):
        errors = _errors(past, judged, horizon)
        for method, each in errors.items():
            scores[method].append(_score(each))
        least = max(SCORES_LEAST, int(SCORES_A_SLOT * (LEADS[horizon] + 1)))
        incumbent = before.chosen[horizon] if horizon < len(before.chosen) else Method.BLEND.value
        chosen.append(_choose(errors, incumbent, least, _margin(LEADS[horizon] + 1)))
    return Calibration(tuple(chosen), {method: _borrowed(rows) for method, rows in scores.items()})


def _margin(slots: int) -> float:
    return MARGIN * (math.sqrt(slots * SLOT_S / 3600) if slots > NEAR_SLOTS else 1.0)


def _errors(past: Past, records: Sequence[Record], horizon: int) -> dict[str, _Errors]:
    ahead = timedelta(seconds=SLOT_S * LEADS[horizon])
    actual = np.array([past.block_from(one.made_at + ahead) for one in records], dtype=np.float64)
    recent = np.array([past.made_at - one.made_at - ahead <= RATIOS_FOR for one in records], dtype=bool)
    return {
        method.value: _Errors(
            _column([one.p50 for one in records], method, horizon),
            _column([one.p90 for one in records], method, horizon),
            actual,
            recent,
        )
        for method in Method
    }


def _column(rows: Iterable[Mapping[str, Sequence[float]]], method: Method, horizon: int) -> Floats:
    values = (row.get(method.value, ())[horizon : horizon + 1] for row in rows)
    return np.array([value[0] if value else float("nan") for value in values], dtype=np.float64)


def _score(errors: _Errors) -> Score:
    known = errors.known
    count, actual = int(known.sum()), errors.actual[known]
    if not count:
        return Score(0, None, None, ())
    off, load = float(np.abs(errors.p50[known] - actual).sum()), float(actual.sum())
    ratios = (errors.actual + OFFSET) / (errors.p50 + OFFSET)
    return Score(
        count,
        round(off / load, 4) if load > 0 else None,
        round(float(np.mean(actual <= errors.p90[known])), 4),
        _factors(np.sort(ratios[known & errors.recent])),
    )


def _factors(ratios: Floats) -> tuple[float, ...]:
    """Conformal: of n ratios the one of rank ceil((n + 1) q), or the greatest. A p90 is at least the p50."""
    count = len(ratios)
    if count < SCORES_LEAST:
        return ()
    ranks = (min(count, int(np.ceil((count + 1) * quantile))) for quantile in QUANTILES)
    return tuple(round(max(1.0, float(ratios[rank - 1])), 4) for rank in ranks)


def _borrowed(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Horizons without own factors use those of the next shorter one."""
    factors: tuple[float, ...] = UNKNOWN_FACTORS
    whole = []
    for score in scores:
        factors = score.factors or factors
        whole.append(Score(score.count, score.wape, score.held, factors))
    return tuple(whole)


def _choose(errors: Mapping[str, _Errors], incumbent: str, scores_least: int, margin: float) -> str:
    """The best method compared with the current one, if better by more than the margin."""
    in_force = errors[incumbent]
    best, least = incumbent, 1.0 - margin
    for method, other in errors.items():
        both = in_force.known & other.known
        if method == incumbent or both.sum() < scores_least:
            continue
        mine, its = (float(np.abs(one.p50[both] - one.actual[both]).sum()) for one in (in_force, other))
        if mine > 0 and its / mine < least:
            best, least = method, its / mine
    return best
