"""The one place that reads a clock. Everything that decides takes `now` as an argument instead.

The time is PostgreSQL's, because all processes compare times there: a wrong or changed clock of a host must not end a
lease early or make a report look old. New connections (kernel.apps) and checks of used ones (kernel.postgresql) compare
the clocks; in between the host's monotonic clock counts. A process without a database uses its host's time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

COMPARE_EVERY_S = 10.0
"""A monotonic clock is a millisecond off after 10 s at the worst rate that NTP corrects (500 ppm: 5 ms)."""
DOUBTFUL_AFTER_S = 1.0
"""A slower comparison is off by up to half of its duration, so an older one is better."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """PostgreSQL's time at a moment of the monotonic clock."""

    time: datetime
    at_s: float


class DatabaseClock:
    """The time since the last comparison, shared by threads."""

    def __init__(
        self, wall: Callable[[], datetime] = lambda: datetime.now(UTC), ticks_s: Callable[[], float] = monotonic
    ) -> None:
        self._wall = wall
        self._ticks_s = ticks_s
        self._last: Comparison | None = None
        self._tried_at_s = float("-inf")
        self._comparing = threading.Lock()

    def now(self) -> datetime:
        """Current time, aware, in UTC."""
        last = self._last
        return self._wall() if last is None else last.time + timedelta(seconds=self._ticks_s() - last.at_s)

    @property
    def is_due(self) -> bool:
        return self._ticks_s() - self._tried_at_s >= COMPARE_EVERY_S

    def compare(self, read: Callable[[], datetime]) -> None:
        """Set the time that `read` gets from PostgreSQL. One thread at a time; others keep the last comparison."""
        if not self._comparing.acquire(blocking=False):
            return
        try:
            self._tried_at_s = began_s = self._ticks_s()
            time, ended_s = read(), self._ticks_s()
            if self._last is None or ended_s - began_s < DOUBTFUL_AFTER_S:
                self._last = Comparison(time.astimezone(UTC), (began_s + ended_s) / 2)
        finally:
            self._comparing.release()


DATABASE_CLOCK = DatabaseClock()


def compare_with(connection: Any) -> None:
    """Compare with the server of this psycopg connection, which has no open transaction, if the last comparison is
    old."""

    def read() -> datetime:
        with connection.cursor() as cursor:  # the driver's own: this is not a query of the connecting code
            (moment,) = cursor.execute("SELECT clock_timestamp()").fetchone()
        return moment  # type: ignore[no-any-return]

    if DATABASE_CLOCK.is_due:
        DATABASE_CLOCK.compare(read)


def now() -> datetime:
    """Current time, aware, in UTC."""
    return DATABASE_CLOCK.now()
