"""What is known of a series, as the forecasters take it. Pure; numpy.

Slots of `HISTORY_SLOT_S` seconds, oldest first, the last of which ends when the forecast is made. Forecasters look at
blocks of `SLOT_S` that end there too, so that whatever the moment, a day is a whole number of blocks.
"""

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from fleet.planning.forecast.series import HISTORY_SLOT_S, SLOT_S, SeriesKey

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
SLOTS_PER_BLOCK = SLOT_S // HISTORY_SLOT_S
KNOWN_LEAST = 2
"""Slots of a block that must be known for it to be."""


@dataclass(frozen=True, slots=True)
class Past:
    """`slots`: requests at once, NaN where there is a hole."""

    key: SeriesKey
    made_at: datetime
    slots: Floats

    def blocks(self) -> Floats:
        """Means of the slots of each block that are known."""
        count = len(self.slots) // SLOTS_PER_BLOCK
        return _means(self.slots[len(self.slots) - count * SLOTS_PER_BLOCK :].reshape(count, SLOTS_PER_BLOCK))

    def block_from(self, starts_at: datetime) -> float:
        """The mean of the block that began then; NaN where it is not known, or not over."""
        ago = round((self.made_at - starts_at).total_seconds() / HISTORY_SLOT_S)
        first = len(self.slots) - ago
        if ago < SLOTS_PER_BLOCK or first < 0:
            return float("nan")
        return float(_means(self.slots[None, first : first + SLOTS_PER_BLOCK])[0])


def past_of(key: SeriesKey, made_at: datetime, slots: Floats) -> Past:
    """Loads that cannot be are holes."""
    return Past(key, made_at, np.where(np.isfinite(slots) & (slots >= 0), slots, np.nan))


def _means(rows: Floats) -> Floats:
    known = ~np.isnan(rows)
    counts = known.sum(axis=1)
    sums = np.where(known, rows, 0.0).sum(axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts >= KNOWN_LEAST)
    return means
