"""Series of demand and what is expected of them. Pure data.

Load is requests at once: those that cells work on and those that wait for one, as the mean of a slot. A slot that
nobody reported whole has no value (`None` in rows, NaN in arrays): a hole is not a zero.
"""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

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
