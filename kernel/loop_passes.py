"""When each control loop last made a whole pass, and how old the queue of housekeeping is: written by who does the
work, read by who does not. All ages are differences of PostgreSQL's own clock.
"""

from django.db import connection

from kernel.control_standing import ControlStanding, LoopAge, standing_of
from kernel.leases import this_holder

_PASSED = """
INSERT INTO kernel_looppass (loop, holder, passed_at, took_s, waited_s)
VALUES (%s, %s, clock_timestamp(), %s, %s)
ON CONFLICT (loop) DO UPDATE SET
    holder = EXCLUDED.holder, passed_at = EXCLUDED.passed_at, took_s = EXCLUDED.took_s, waited_s = EXCLUDED.waited_s
"""
_AGES = """
SELECT loop, EXTRACT(EPOCH FROM clock_timestamp() - passed_at)::float8, took_s, waited_s FROM kernel_looppass
"""


def loop_passed(loop: str, *, took_s: float = 0.0, waited_s: float = 0.0) -> None:
    """A whole pass ended just now."""
    with connection.cursor() as cursor:
        cursor.execute(_PASSED, [loop, this_holder(), took_s, waited_s])


def control_standing() -> ControlStanding:
    """As of now, in one query."""
    with connection.cursor() as cursor:
        cursor.execute(_AGES)
        return standing_of(LoopAge(*row) for row in cursor.fetchall())
