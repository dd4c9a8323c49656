"""Load series, their forecasts and the error ledger as data. Pure, without numpy. Load is concurrent requests, running
or waiting, as the mean of a slot. A slot that was not reported completely has no value (`None` in rows, NaN in arrays),
which is not zero."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

HISTORY_SLOT_S = 300
SLOT_S = 900
SLOTS = 96
LEADS = (0, 1, 3, 7, 15, 31, 63, 95)
"""Slots ahead with scores, from 15 minutes to a day: one horizon each."""


class Method(StrEnum):
    """Forecast method of a slot. `average` is the mean of the last week."""

    AVERAGE = "average"
    LAST = "last"
    SEASONAL = "seasonal_day"
    SHAPE = "day_shape"
    BLEND = "blend"


def horizon_of(slot: int) -> int:
    """Returns the nearest of `LEADS` by ratio of time."""
    return min(len(LEADS) - 1, round(math.log2(slot + 1)))


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """A load series: a deployment, the region of its clients (`origin`), and a serving class."""

    deployment: str
    origin: str
    serving_class: str

    def __str__(self) -> str:
        return f"{self.deployment} from {self.origin}, {self.serving_class}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected load of a series: slot `i` is [made_at + i, made_at + i + 1) slots of `slot_s` seconds. `p50` and `p90`:
    quantiles of the slot's mean concurrent requests. `method` of each slot. All have at least `SLOTS` values."""

    key: SeriesKey
    made_at: datetime
    slot_s: int
    p50: tuple[float, ...]
    p90: tuple[float, ...]
    method: tuple[str, ...]

    @property
    def ends_at(self) -> datetime:
        return self.made_at + timedelta(seconds=self.slot_s * len(self.p90))


def forecast_at(forecast: Forecast, now: datetime, within_s: float) -> float | None:
    """Returns the highest p90 in concurrent requests of the slots in [now, now + within_s]; None if the forecast does
    not cover that time."""
    first_s = (now - forecast.made_at).total_seconds()
    first = int(first_s // forecast.slot_s)
    last = int((first_s + max(within_s, 0.0)) // forecast.slot_s)
    if first_s < 0 or last >= len(forecast.p90):
        return None
    return max(forecast.p90[first : last + 1])


SCORES_LEAST = 24
"""Records of a horizon before they count: half a day with one each half hour."""
QUANTILES = (0.9, 0.99)
UNKNOWN_FACTORS = (1.5, 2.0)
"""Of both quantiles, before errors are known."""


@dataclass(frozen=True, slots=True)
class Record:
    """A stored forecast: by method, p50 and p90 at each of `LEADS`."""

    made_at: datetime
    p50: Mapping[str, Sequence[float]]
    p90: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Score:
    """A method's score at a horizon. `wape`: sum of absolute errors over sum of actual loads; None without load.
    `held`: share of slots within p90. `factors`: quantiles over the forecast (`QUANTILES`)."""

    count: int
    wape: float | None
    held: float | None
    factors: tuple[float, ...] = UNKNOWN_FACTORS


@dataclass(frozen=True, slots=True)
class Calibration:
    """By horizon: the current method, and each score."""

    chosen: tuple[str, ...] = ()
    scores: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HorizonErrors:
    """A method at a horizon. `horizon_s`: until the end of the slot. `judged`: forecasts of the last 7 days. `wape`:
    sum of errors over sum of loads. `p90_held`: share of slots within p90, or None. `chosen`: it forecasts there now.
    """

    horizon_s: int
    method: str
    judged: int
    wape: float | None
    p90_held: float | None
    chosen: bool

    @property
    def wape_percent(self) -> float | None:
        return None if self.wape is None else 100 * self.wape

    @property
    def held_percent(self) -> float | None:
        return None if self.p90_held is None else 100 * self.p90_held


def horizon_errors(ledger: Mapping[str, Any]) -> tuple[HorizonErrors, ...]:
    """Returns the rows of a stored `records.Calibration`, without methods that have no score."""
    chosen, scores = ledger.get("chosen", ()), ledger.get("scores", {})
    return tuple(
        HorizonErrors((lead + 1) * SLOT_S, method, row["count"], row["wape"], row["held"], method == chosen[number])
        for number, lead in enumerate(LEADS[: len(chosen)])
        for method, rows in scores.items()
        for row in rows[number : number + 1]
        if row["count"]
    )
