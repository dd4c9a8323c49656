"""Plans the day after each round of forecasts: hands a child what is known, and stores its plan.

A look never waits for the child. One that does not end is ended, and the plan of before counts until it is too old.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec

from fleet.planning.capacity.view import CapacityPlan
from fleet.services.capacity_plan import day_plan_store
from traffic.selectors.capacity_view import capacity_view

ENDED_AFTER_S = 90.0
"""A plan takes seconds; on a host that starves, longer."""
NICE = 10
ERROR_MOST = 300
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CHECKOUT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A plan that is being made, since when, by whom, and where it is written."""

    began: datetime
    child: subprocess.Popen[bytes]
    answer: IO[bytes]
    errors: IO[bytes]


class DayPlanner:
    """The plans of one planner process."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "traffic.services.capacity_child")) -> None:
        self._command = command
        self._under_way: _UnderWay | None = None

    def begin(self, *, now: datetime) -> bool:
        """Begin a plan by what is known now; False: there is nothing to plan by, or one is under way."""
        if self._under_way is not None:
            return False
        view = capacity_view(now)
        if view is None:
            return False
        answer, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is over
        with tempfile.TemporaryFile() as question:
            question.write(msgspec.msgpack.encode(view))
            question.seek(0)
            child = subprocess.Popen(
                ["nice", "-n", str(NICE), *self._command],
                stdin=question,
                stdout=answer,
                stderr=errors,
                cwd=_CHECKOUT,
                env={**os.environ, **_ONE_THREAD},
            )
        self._under_way = _UnderWay(now, child, answer, errors)
        return True

    def look(self, *, now: datetime) -> bool:
        """See whether it is over, and store it; to be called every few seconds. True: there is a new plan."""
        found = self._under_way
        if found is None:
            return False
        took_s = (now - found.began).total_seconds()
        if found.child.poll() is None:
            if took_s < ENDED_AFTER_S:
                return False
            found.child.kill()
        self._under_way = None
        status = found.child.wait()
        with found.answer, found.errors:
            plan = _read(found.answer)
            if plan is None:
                found.errors.seek(0)
                said = found.errors.read().decode(errors="replace").strip()[-ERROR_MOST:]
                log.warning("no plan of the day, after %.0f s with status %d: %s", took_s, status, said)
                return False
        day_plan_store(plan=plan, took_s=took_s, now=now)
        return True

    @property
    def child(self) -> subprocess.Popen[bytes] | None:
        return self._under_way.child if self._under_way else None

    def stop(self) -> None:
        """End what is under way: the process ends."""
        if self._under_way is not None:
            self._under_way.child.kill()
            self._under_way.child.wait()
            self._under_way.answer.close()
            self._under_way.errors.close()
            self._under_way = None


def _read(answer: IO[bytes]) -> CapacityPlan | None:
    """None: it was not written whole."""
    answer.seek(0)
    try:
        return msgspec.msgpack.decode(answer.read(), type=CapacityPlan)
    except msgspec.DecodeError:
        return None
