"""Control loops: reconciling, provisioning, publishing and others that must never wait behind housekeeping. Each is a
Celery task without arguments; `settings.CONTROL_LOOPS` names its queue and how often it runs.

The worker of that queue starts a pass whenever the interval is over, with or without a broker (kernel.loop_worker). A
wake-up makes the next pass come sooner. It is a mark, not a message: wake-ups that arrive during a pass become one more
pass, none expires, and a lost one costs one interval. A pass that finds nothing to do may state a longer one."""

import json
import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any

from celery import Task
from django.conf import settings
from django.db import DatabaseError, connection, transaction

from kernel.loop_passes import PASSES
from kernel.tracing import request_id, traceparent

CHANNEL = "switchyard_control_loops"
"""PostgreSQL notifications carry wake-ups: they reach every control host and need no broker."""

log = logging.getLogger(__name__)


class ControlLoop(Task):  # type: ignore[type-arg]  # has no parameters at run time
    """Base class of a control loop's task. Its function makes one pass; it returns False if another process does."""

    abstract = True
    acks_late = True
    ignore_result = True
    Strategy = "kernel.loop_worker:wake_up_strategy"

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        """Make one pass, and record the end of a complete one."""
        began_s = monotonic()
        is_whole = bool(self.run(*args, **kwargs))
        if is_whole:
            PASSES.note(str(self.name), monotonic() - began_s)
        return is_whole


def control_loops(queues: Iterable[str]) -> dict[str, float]:
    """Returns the loops of these queues with the seconds between two passes of each."""
    return {name: every_s for queue in queues for name, every_s in settings.CONTROL_LOOPS.get(queue, {}).items()}


def is_control_loop(name: str) -> bool:
    return name in control_loops(settings.CONTROL_LOOPS)


_rests: dict[str, float] = {}


def rest_loop(name: str, seconds: float) -> None:
    """Called by a pass: without a wake-up the next pass of this loop in this process may come after so long, if that is
    longer than its interval."""
    _rests[name] = seconds


def rest_taken(name: str) -> float:
    """Returns the seconds that the last pass of a loop stated, once."""
    return _rests.pop(name, 0.0)


def wake_loop(name: str) -> None:
    """Wake a loop after the current transaction. Never raises, because the loop runs soon anyway."""
    text = json.dumps({"loop": name, "request_id": request_id(), "traceparent": traceparent()})
    transaction.on_commit(lambda: _notify(text), robust=True)


def _notify(text: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, text])
    except DatabaseError as error:
        log.warning("no wake-up was sent: %s", error)
