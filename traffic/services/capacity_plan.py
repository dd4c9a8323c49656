"""Plans the day after each round of forecasts: hands a child what is known, and stores its plan.

A look never waits for the child. One that does not end is ended, and the plan of before counts until it is too old.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec
from django.db import transaction

from fleet.models import DayPlan, DayPlanPlace, DeploymentRegion
from fleet.planning.capacity.need import place_plan
from fleet.planning.capacity.view import CapacityPlan
from kernel import live
from traffic.selectors.capacity_view import capacity_view
from traffic.services.forecast import Forecaster

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


# Keeps plans of the day: the newest is what counts, those before it show what was thought.

PLANS_KEPT = 48
"""Four hours of them."""


@transaction.atomic
def day_plan_store(*, plan: CapacityPlan, took_s: float, now: datetime) -> DayPlan:
    """Store a plan, in place of one from the same time, and forget old ones. What of the fleet was removed meanwhile is
    left out."""
    DayPlan.objects.filter(at=plan.at).delete()
    row = DayPlan.objects.create(
        at=plan.at,
        made_at=now,
        slot_s=plan.slot_s,
        solver=plan.solver,
        why=plan.why,
        took_s=round(took_s, 3),
        shifts=plan.shifts,
        dollars=list(plan.dollars),
        machines=[asdict(one) for one in plan.machines],
        orders=[asdict(one) for one in plan.orders],
        lacks=[asdict(one) for one in plan.lacks],
    )
    DayPlanPlace.objects.bulk_create(_places(row, plan))
    kept = DayPlan.objects.order_by("-at").values_list("pk", flat=True)[:PLANS_KEPT]
    DayPlan.objects.exclude(pk__in=list(kept)).delete()
    live.push("capacity-plan")
    return row


def _places(row: DayPlan, plan: CapacityPlan) -> Iterator[DayPlanPlace]:
    for deployment, region in DeploymentRegion.objects.values_list("deployment_id", "region_id"):
        found = place_plan(plan, deployment, region)
        if found is not None:
            yield DayPlanPlace(
                plan=row,
                deployment_id=deployment,
                region_id=region,
                cells=list(found.cells),
                by_type={
                    one.instance_type: list(one.cells)
                    for one in plan.cells
                    if (one.deployment, one.region) == (deployment, region)
                },
                expected=list(found.expected),
                cover=list(found.cover),
                budget=list(found.budget),
                due=list(found.due),
                start_up_s=found.start_up_s,
            )


# What the process `planner` does besides measuring demand: forecasts, and the plan of the day that follows them.


class Planner:
    def __init__(self, forecaster: Forecaster | None = None, day: DayPlanner | None = None) -> None:
        self._forecaster = forecaster or Forecaster()
        self._day = day or DayPlanner()

    def look(self, *, now: datetime) -> bool:
        """To be called every few seconds. Returns True if there are new forecasts, from which a plan of the day is then
        made in a child process."""
        has_new = self._forecaster.look(now=now) is not None
        if has_new:
            self._day.begin(now=now)
        self._day.look(now=now)
        return has_new

    def stop(self) -> None:
        """Stop the child that plans the day: the process ends."""
        self._day.stop()
