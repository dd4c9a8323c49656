"""A histogram of durations that answers for the last seconds and for all time. Pure: `now` is an argument.

Buckets grow by 2^(1/8) from 0.1 ms, so a percentile is right to about 4.5 % whatever the load, and neither recording
nor asking ever sorts samples: both run on the loop that carries the tokens.
"""

import math
from collections import deque

FIRST_EDGE_S = 1e-4
BUCKETS_PER_DOUBLING = 8
DOUBLINGS = 23
"""Up to 839 s, beyond the longest silence of a request."""
BUCKETS = BUCKETS_PER_DOUBLING * DOUBLINGS + 2
"""One below the first edge, one above the last."""


def bucket_of(value_s: float) -> int:
    """Index of the bucket whose upper edge is the first one >= `value_s`."""
    if value_s <= FIRST_EDGE_S:
        return 0
    index = math.ceil(math.log2(value_s / FIRST_EDGE_S) * BUCKETS_PER_DOUBLING - 1e-9)
    return min(index, BUCKETS - 1)


def upper_edge_s(index: int) -> float:
    """Upper edge of a bucket in seconds."""
    return FIRST_EDGE_S * math.exp2(index / BUCKETS_PER_DOUBLING)


class SlidingHistogram:
    """Counts per bucket, for all time and over a window of whole seconds."""

    def __init__(self, window_s: int) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._window_s = window_s
        self._all = [0] * BUCKETS
        self._window = [0] * BUCKETS
        self._window_count = 0
        self._seconds: deque[tuple[int, dict[int, int]]] = deque()

    def record(self, now: float, value_s: float) -> None:
        """Add one duration."""
        index = bucket_of(value_s)
        self.count += 1
        self.sum_s += value_s
        self._all[index] += 1
        self._window[index] += 1
        self._window_count += 1
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._expire(second)
            self._seconds.append((second, {}))
        slot = self._seconds[-1][1]
        slot[index] = slot.get(index, 0) + 1

    def quantile(self, now: float, q: float) -> float | None:
        """The `q` quantile (0..1) over the window in seconds; None without samples."""
        self._expire(int(now))
        if not self._window_count:
            return None
        wanted = max(1, math.ceil(q * self._window_count))
        seen = 0
        for index, count in enumerate(self._window):
            seen += count
            if seen >= wanted:
                return _middle_s(index)
        raise AssertionError("the window's buckets do not sum to its count")

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper edge in seconds, samples of all time at or below it), one per doubling, for Prometheus."""
        pairs: list[tuple[float, int]] = []
        seen = 0
        for index, count in enumerate(self._all[:-1]):
            seen += count
            if index % BUCKETS_PER_DOUBLING == 0:
                pairs.append((upper_edge_s(index), seen))
        return pairs

    def _expire(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            for index, count in self._seconds.popleft()[1].items():
                self._window[index] -= count
                self._window_count -= count


def _middle_s(index: int) -> float:
    """Geometric middle of a bucket: the value with the smallest relative error."""
    return upper_edge_s(index) * math.exp2(-0.5 / BUCKETS_PER_DOUBLING)
