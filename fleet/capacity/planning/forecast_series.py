"""Series of demand and what is expected of them. Pure data.

Load is requests at once: those that cells work on and those that wait for one, as the mean of a slot. A slot that
nobody reported whole has no value (`None` in rows, NaN in arrays): a hole is not a zero.

What the error ledger is made of: forecasts as they were made, and scores of methods. Pure data, without numpy.

The ledger as people read it. Pure, without numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

HISTORY_SLOT_S = 300
SLOT_S = 900
SLOTS = 96
"""A day ahead."""
LEADS = (0, 1, 3, 7, 15, 31, 63, 95)
"""Slots ahead that are scored, from the next 15 minutes to a day: a horizon for each."""


class Method(StrEnum):
    """How a slot is forecast. `average` is the mean of the last week."""

    AVERAGE = "average"
    LAST = "last"
    SEASONAL = "seasonal_day"
    SHAPE = "day_shape"
    BLEND = "blend"


def horizon_of(slot: int) -> int:
    """Which of `LEADS` stands for a slot ahead: the nearest one, by ratios of time."""
    return min(len(LEADS) - 1, round(math.log2(slot + 1)))


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """Whose load it is: of a deployment, sent by the applications of a region (`origin`), in a serving class."""

    deployment: str
    origin: str
    serving_class: str

    def __str__(self) -> str:
        return f"{self.deployment} from {self.origin}, {self.serving_class}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a series, slot by slot from `made_at` on: slot `i` is [made_at + i, made_at + i + 1) slots of
    `slot_s` seconds. `p50` and `p90`: requests at once as the mean of the slot, quantiles; `method`: by which method
    each slot was forecast. All are equally long, `SLOTS` of them at least."""

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
    """The greatest p90 of the slots that [now, now + within_s] touches, in requests at once; None: the forecast says
    nothing of some of that time."""
    first_s = (now - forecast.made_at).total_seconds()
    first = int(first_s // forecast.slot_s)
    last = int((first_s + max(within_s, 0.0)) // forecast.slot_s)
    if first_s < 0 or last >= len(forecast.p90):
        return None
    return max(forecast.p90[first : last + 1])


SCORES_LEAST = 24
"""Records of a horizon before anything is concluded from them: half a day of one each half hour."""
QUANTILES = (0.9, 0.99)
UNKNOWN_FACTORS = (1.5, 2.0)
"""Of both quantiles before there are errors to go by."""


@dataclass(frozen=True, slots=True)
class Record:
    """A forecast as it was made: by method, p50 and p90 at each of `LEADS`."""

    made_at: datetime
    p50: Mapping[str, Sequence[float]]
    p90: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Score:
    """Of a method at a horizon. `wape`: the sum of absolute errors over that of actual loads, None where there was no
    load; `held`: the share of slots that stayed within p90; `factors`: quantiles over the forecast, see `QUANTILES`."""

    count: int
    wape: float | None
    held: float | None
    factors: tuple[float, ...] = UNKNOWN_FACTORS


@dataclass(frozen=True, slots=True)
class Calibration:
    """By horizon: the method in force, and the score of each."""

    chosen: tuple[str, ...] = ()
    scores: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HorizonErrors:
    """How one method did at one horizon. `horizon_s`: until the end of the slot; `judged`: so many forecasts of the
    last 7 days; `wape`: the sum of errors over that of loads; `p90_held`: the share of slots within p90; None: not
    known. `chosen`: it forecasts there now."""

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
    """Of a stored `records.Calibration`: by horizon and method; those that were never judged are left out."""
    chosen, scores = ledger.get("chosen", ()), ledger.get("scores", {})
    return tuple(
        HorizonErrors((lead + 1) * SLOT_S, method, row["count"], row["wape"], row["held"], method == chosen[number])
        for number, lead in enumerate(LEADS[: len(chosen)])
        for method, rows in scores.items()
        for row in rows[number : number + 1]
        if row["count"]
    )
