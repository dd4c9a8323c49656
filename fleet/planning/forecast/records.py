"""What the error ledger is made of: forecasts as they were made, and scores of methods. Pure data, without numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

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
