"""A histogram of durations that answers for the last seconds and for all time. Pure: `now` is an argument.

Neither recording nor asking ever sorts samples: both run on the loop that carries the tokens.
"""

import math
from collections import deque

from engine_agent.protocol.metrics import BUCKETS, BUCKETS_PER_DOUBLING, bucket_of, midpoint_s, upper_edge_s


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
                return midpoint_s(index)
        raise AssertionError("the window's buckets do not sum to its count")

    def recent_count(self, now: float) -> int:
        self._expire(int(now))
        return self._window_count

    def counts(self) -> dict[int, int]:
        """Samples of all time by bucket, without the empty buckets."""
        return {index: count for index, count in enumerate(self._all) if count}

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
