"""The error ledger: how far each method was off at each horizon, which one forecasts there now, and by which factors
its quantiles follow. Pure; numpy.

It goes by forecasts as they were made (`Record`), never by fitting the past again. A method is judged beside another
by records that have both.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from fleet.planning.forecast.methods import OFFSET
from fleet.planning.forecast.past import Flags, Floats, Past
from fleet.planning.forecast.records import QUANTILES, SCORES_LEAST, UNKNOWN_FACTORS, Calibration, Record, Score
from fleet.planning.forecast.series import LEADS, SLOT_S, Method

JUDGED_FOR = timedelta(days=7)
"""Records that began before are too old to choose a method by."""
RATIOS_FOR = timedelta(days=3)
"""Quantiles follow what was seen lately."""
SCORES_A_SLOT = 1.5
"""And so many for each slot ahead: forecasts that overlap err together. One each half hour, that is three horizons."""
MARGIN = 0.03
"""By so much another method must have been nearer before it takes over; beyond `NEAR_SLOTS`, times the root of the
hours ahead: the longer a horizon is, the fewer errors of a week are of their own."""
NEAR_SLOTS = 16


@dataclass(frozen=True, slots=True)
class _Errors:
    """Of one method at one horizon, a row a record: forecasts and actual loads; NaN where either is not known."""

    p50: Floats
    p90: Floats
    actual: Floats
    recent: Flags

    @property
    def known(self) -> Flags:
        return ~(np.isnan(self.p50) | np.isnan(self.actual))


def calibrate(past: Past, records: Iterable[Record], before: Calibration) -> Calibration:
    """The ledger as of the end of the past."""
    judged = sorted(
        (one for one in records if past.made_at - JUDGED_FOR <= one.made_at < past.made_at), key=lambda one: one.made_at
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
    """Conformal: of n ratios the one of rank ceil((n + 1) q), or the greatest. A p90 is no less than the p50."""
    count = len(ratios)
    if count < SCORES_LEAST:
        return ()
    ranks = (min(count, int(np.ceil((count + 1) * quantile))) for quantile in QUANTILES)
    return tuple(round(max(1.0, float(ratios[rank - 1])), 4) for rank in ranks)


def _borrowed(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Horizons that have no factors of their own yet take those of the next shorter one."""
    factors: tuple[float, ...] = UNKNOWN_FACTORS
    whole = []
    for score in scores:
        factors = score.factors or factors
        whole.append(Score(score.count, score.wape, score.held, factors))
    return tuple(whole)


def _choose(errors: Mapping[str, _Errors], incumbent: str, scores_least: int, margin: float) -> str:
    """The method that was nearest beside the one in force, if it was by more than the margin."""
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
