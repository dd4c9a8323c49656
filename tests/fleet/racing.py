"""Two steps that race on real PostgreSQL, each in a separate transaction."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from django.db import IntegrityError, connection, connections, transaction

from kernel.transitions import StaleDecision

DEADLINE_S = 60.0
POLL_S = 0.01

Step = Callable[[], None]


def race(first: Step, second: Step) -> str:
    """Run both so that the second begins before the first commits. Returns how the second ended."""
    with ThreadPoolExecutor() as threads:
        with transaction.atomic():
            first()
            ending = threads.submit(_with_own_connection, second)
            _until_it_waits_for_us_or_is_done(ending)
        return ending.result(DEADLINE_S)


def _with_own_connection(step: Step) -> str:
    try:
        step()
    except (StaleDecision, IntegrityError) as dropped:
        return type(dropped).__name__
    finally:
        connections.close_all()
    return "applied"


def _until_it_waits_for_us_or_is_done(ending: "Future[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ending.done():
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            if cursor.fetchone()[0]:
                return
        assert time.monotonic() < deadline, "the second step neither waits nor ends"
        time.sleep(POLL_S)
