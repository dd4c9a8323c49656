"""The last complete pass of each control loop, and the age of the queue of housekeeping. Ages are differences of
PostgreSQL's clock."""

import threading
from collections.abc import Callable
from time import monotonic

from django.db import connection
from psycopg import sql

from kernel.control_standing import ControlStanding, LoopAge, standing_of
from kernel.leases import this_holder

_PASS = sql.SQL("(%s, %s, clock_timestamp() - make_interval(secs => %s), %s, %s)")
_PASSED = sql.SQL("""
INSERT INTO kernel_looppass (loop, holder, passed_at, took_s, waited_s) VALUES {passes}
ON CONFLICT (loop) DO UPDATE SET
    holder = EXCLUDED.holder, passed_at = EXCLUDED.passed_at, took_s = EXCLUDED.took_s, waited_s = EXCLUDED.waited_s
""")
_AGES = """
SELECT loop, EXTRACT(EPOCH FROM clock_timestamp() - passed_at)::float8, took_s, waited_s FROM kernel_looppass
"""


def loop_passed(loop: str, *, took_s: float = 0.0, waited_s: float = 0.0) -> None:
    _write([(loop, this_holder(), 0.0, took_s, waited_s)])


class PassBook:
    """The passes of one process. Any thread may `note` the end of one; one thread writes all together."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[str, float, float]] = {}
        self._written_s = float("-inf")

    def note(self, loop: str, took_s: float) -> None:
        """Note that a complete pass of a loop ended now, in the calling thread."""
        with self._lock:
            self._ended[loop] = (this_holder(), self._now_s(), took_s)

    def write_every(self, pause_s: float) -> None:
        """Write the passes, unless that was done within the last `pause_s`."""
        if self._now_s() - self._written_s >= pause_s:
            self._written_s = self._now_s()
            self.write()

    def write(self) -> None:
        """Write all passes in one statement, each with its own time. After a failure they are written the next time,
        unless the loop has ended another pass by then."""
        with self._lock:
            ended, self._ended = self._ended, {}
        if not ended:
            return
        now_s = self._now_s()
        try:
            # In a fixed order, so that two concurrent writers cannot deadlock.
            _write([(loop, who, now_s - at, took_s, 0.0) for loop, (who, at, took_s) in sorted(ended.items())])
        except BaseException:
            with self._lock:
                self._ended = ended | self._ended
            raise


PASSES = PassBook()
"""The passes of this process."""


def _write(passes: list[tuple[str, str, float, float, float]]) -> None:
    with connection.cursor() as cursor:
        rows = sql.SQL(", ").join([_PASS] * len(passes))
        cursor.execute(_PASSED.format(passes=rows), [value for row in passes for value in row])


def control_standing() -> ControlStanding:
    with connection.cursor() as cursor:
        cursor.execute(_AGES)
        return standing_of(LoopAge(*row) for row in cursor.fetchall())
