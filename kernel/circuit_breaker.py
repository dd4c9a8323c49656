"""After a failure of a server, callers skip it for a while instead of waiting for it."""

import time
from collections.abc import Callable


class CircuitBreaker:
    """Open for `pause_s` seconds after `trip`. Threads may share one; in a race one more try is made."""

    def __init__(self, pause_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.pause_s = pause_s
        self._now_s = now_s
        self._open_until_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether callers should skip the server."""
        return self._now_s() < self._open_until_s

    def trip(self) -> None:
        self._open_until_s = self._now_s() + self.pause_s


VALKEY_BREAKER = CircuitBreaker(pause_s=2.0)
"""Shared by hints and wake-ups, because one server carries both. Periodic passes of worker, hub and browsers find what
is lost during a pause."""
