"""Load histories for tests: days with a shape, and defects."""

from datetime import UTC, datetime

import numpy as np

from fleet.capacity.planning.forecast import Floats, Past, past_of
from fleet.capacity.planning.forecast_series import SeriesKey

MADE = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
KEY = SeriesKey("chat", "eu-west", "realtime")
DAY_SLOTS = 288


def days(count: float, level: float = 40.0) -> Floats:
    """Slots of equal days up to `MADE`, with fixed noise."""
    slots = np.arange(int(count * DAY_SLOTS))
    noise = np.random.default_rng(7).normal(0.0, 0.03, len(slots))
    loads: Floats = level * (1.0 + 0.6 * np.sin(2 * np.pi * slots / DAY_SLOTS)) * (1.0 + noise)
    return loads


def past(slots: Floats, made_at: datetime = MADE) -> Past:
    return past_of(KEY, made_at, slots)
