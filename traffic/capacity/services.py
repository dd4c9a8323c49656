"""Runs the autoscaler, the role planner and the plan of the day: reads places, calls the planners, and applies their
decisions through the fleet's services. Passes depend only on stored rows, so lost work is decided again. The plan of
the day runs in a child process after each round of forecasts; a pass never waits for it. A hanging child is killed, and
the previous plan counts until it is too old."""

import logging
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec
from django.db import transaction

from fleet.autoscaling.planning.needs import (
    ScaledPlace,
    ScalingView,
    hold_s,
    may_be_empty,
    ready_at_s,
    stepped_s,
    withheld_by,
)
from fleet.autoscaling.planning.planner import plan_scaling
from fleet.autoscaling.planning.policy import CellRange
from fleet.autoscaling.planning.recording import ScaledFleet, SetCells, round_of
from fleet.autoscaling.planning.roles import plan_ratio
from fleet.autoscaling.selectors import has_ranges
from fleet.autoscaling.services import RoleLook, ScalingLook, role_apply, scaling_apply
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.capacity.planning.view import CapacityPlan, place_plan
from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import claim_of
from fleet.recorder.planning.loops import Round
from fleet.recorder.services import Recorder
from kernel import live, wake_ups
from kernel.leases import lease_during
from traffic.capacity.selectors.autoscaling import ScaledDeployment, scaled_deployments
from traffic.capacity.selectors.plans import capacity_view, planned_places
from traffic.demand.services import Forecaster
from traffic.region_shares.services.losses import region_losses_store
from traffic.routing.models import PoolHold

LEASE = "autoscaler"
PASS_LIMIT_S = 20.0
"""A pass takes tens of milliseconds; after this time another controller may try."""

log = logging.getLogger(__name__)


def autoscaling_run(*, now: datetime, recorder: Recorder | None = None) -> list[str]:
    """Runs one pass over all deployments. Returns those whose cells change; empty while another controller runs it.
    Makes one query if no deployment has a range. `recorder`: stores what was decided, after the lease is released."""
    if not has_ranges():
        return []
    applied: list[ScalingLook] = []
    with lease_during(name=LEASE, ttl_s=PASS_LIMIT_S, now=now) as is_ours:
        if not is_ours:
            return []
        scaled, problems = scaled_deployments(now)
        for name, problem in problems.items():
            log.warning("cannot scale %s: %s", name, problem)
        looks = [look for one in scaled for look in _scaling_looks(one, now)]
        applied = scaling_apply(looks=looks, now=now) if looks else []
        pool_holds_follow(scaled=scaled, now=now)
    if recorder is not None and any(look.is_news for look in applied):
        recorder.record(_rounds(scaled, looks, applied, now))
    return sorted({look.place.deployment_id for look in applied if look.sets_cells})


def _rounds(
    scaled: Iterable[ScaledDeployment], looks: Iterable[ScalingLook], applied: Iterable[ScalingLook], now: datetime
) -> Iterator[Round]:
    """One round, with the deployments for which the pass decided something."""
    done = {id(look) for look in applied}
    news = [look for look in looks if look.is_news]
    names = {look.place.deployment_id for look in news}
    fleet = ScaledFleet(
        {one.view.deployment: one.view for one in scaled if one.view.deployment in names},
        frozenset(one.view.deployment for one in scaled if one.view.deployment in names and one.acting),
    )
    yield round_of(fleet, tuple(map(_set_cells, news)), tuple(id(look) in done for look in news), now)


def _set_cells(look: ScalingLook) -> SetCells:
    decision, deployment = look.decision, look.place.deployment_id
    wanted, rule, reason = decision.wanted, decision.rule, decision.reason
    return SetCells(deployment, decision.region, look.wanted_before, wanted, rule, reason, look.acting)


def _scaling_looks(one: ScaledDeployment, now: datetime) -> list[ScalingLook]:
    places = {place.region: place for place in one.view.places}
    return [
        ScalingLook(
            place=one.rows[decision.region],
            acting=one.acting,
            decision=decision,
            load={
                "per_cell": _per_cell(one.view, places[decision.region]),
                "start_up_s": round(one.view.start_up_s, 1),
                **(_rounded_load(asdict(load)) if (load := places[decision.region].load) else {}),
            },
        )
        for decision in plan_scaling(one.view, now)
    ]


def _per_cell(view: ScalingView, place: ScaledPlace) -> float:
    return round(view.at(place).per_cell, 2) if place.capacities else view.per_cell


def _rounded_load(load: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 2) for name, value in load.items()}


# Request holds for deployments that scale to zero: how long a request waits for the first cell, when that is expected,
# and what prevents it. Without autoscaling the wait would be pointless, so there is no hold.

_HOLD_COLUMNS = ("for_s", "cold_start_s", "ready_at", "regions", "withheld")
_STARTS = (CellState.PENDING.value, CellState.STARTING.value)


def pool_holds_follow(*, scaled: Iterable[ScaledDeployment], now: datetime) -> bool:
    """Writes changed holds. Returns whether ingresses need new tables."""
    held = {
        one.view.deployment: one for one in scaled if one.acting and may_be_empty(one.view.policy, _cell_ranges(one))
    }
    there = {row.deployment_id: row for row in PoolHold.objects.all()}
    started = _start_times(held) if held else {}
    wanted = {name: _hold_row(one, started.get(name, [])) for name, one in held.items()}
    gone = there.keys() - wanted.keys()
    changed = [row for name, row in wanted.items() if name not in there or not _is_same(row, there[name])]
    if gone:
        PoolHold.objects.filter(deployment__in=gone).delete()
    PoolHold.objects.bulk_create(
        changed,
        update_conflicts=True,
        unique_fields=["deployment"],
        update_fields=list(_HOLD_COLUMNS),
    )
    if gone or changed:
        wake_ups.send("traffic.publish")
    return bool(gone or changed)


def _cell_ranges(one: ScaledDeployment) -> list[CellRange]:
    return [place.range for place in one.view.places]


def _hold_row(one: ScaledDeployment, started: list[datetime]) -> PoolHold:
    is_served = any(place.ready for place in one.view.places)
    return PoolHold(
        deployment_id=one.view.deployment,
        for_s=hold_s(one.view.policy, one.view.start_up_s),
        cold_start_s=stepped_s(one.view.start_up_s),
        ready_at=0 if is_served else ready_at_s(started, one.view.start_up_s),
        regions=sorted(place.region for place in one.view.places),
        withheld=withheld_by(claim_of(row) for row in one.rows.values()).value,
    )


def _is_same(row: PoolHold, other: PoolHold) -> bool:
    return all(getattr(row, name) == getattr(other, name) for name in _HOLD_COLUMNS)


def _start_times(names: Iterable[str]) -> dict[str, list[datetime]]:
    started: dict[str, list[datetime]] = defaultdict(list)
    cells = Cell.objects.filter(deployment__in=list(names), state__in=_STARTS).order_by()
    for name, created_at in cells.values_list("deployment_id", "created_at"):
        started[name].append(created_at)
    return started


# The role planner.

ROLES_LEASE = "role-planner"
ROLES_PASS_LIMIT_S = 20.0


def roles_plan(*, now: datetime) -> list[str]:
    """Runs one pass. Returns deployments whose cells change roles; empty while another controller runs it."""
    with lease_during(name=ROLES_LEASE, ttl_s=ROLES_PASS_LIMIT_S, now=now) as is_ours:
        if not is_ours:
            return []
        looks = [
            RoleLook(one.row, one.acting, plan_ratio(one.view), one.figures, one.counted) for one in planned_places(now)
        ]
        return sorted(
            {look.place.deployment_id for look in looks if role_apply(look=look, now=now) and look.sets_roles}
        )


ENDED_AFTER_S = 90.0
"""A plan takes seconds, or longer on an overloaded host."""
NICE = 10
ERROR_MOST = 300
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    began: datetime
    child: subprocess.Popen[bytes]
    answer: IO[bytes]
    errors: IO[bytes]


class DayPlanner:
    """Plans of the day of one controller."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "traffic.capacity.child")) -> None:
        self._command = command
        self._under_way: _UnderWay | None = None

    def begin(self, *, now: datetime) -> bool:
        """Starts a plan from the present state. Returns False without a forecast, or if one is running."""
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

    def poll(self, *, now: datetime) -> bool:
        """Checks the child and stores its plan. Call it every few seconds. Returns whether there is a new plan."""
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
            plan = _read_plan(found.answer)
            if plan is None:
                found.errors.seek(0)
                output = found.errors.read().decode(errors="replace").strip()[-ERROR_MOST:]
                log.warning("no plan of the day after %.0f s, status %d: %s", took_s, status, output)
                return False
        day_plan_store(plan=plan, took_s=took_s, now=now)
        return True

    @property
    def child(self) -> subprocess.Popen[bytes] | None:
        return self._under_way.child if self._under_way else None

    def stop(self) -> None:
        """Kills the child, because this process exits."""
        if self._under_way is not None:
            self._under_way.child.kill()
            self._under_way.child.wait()
            self._under_way.answer.close()
            self._under_way.errors.close()
            self._under_way = None


def _read_plan(answer: IO[bytes]) -> CapacityPlan | None:
    """Returns None if the output is incomplete."""
    answer.seek(0)
    try:
        return msgspec.msgpack.decode(answer.read(), type=CapacityPlan)
    except msgspec.DecodeError:
        return None


# Stored plans of the day: the newest counts; older ones are history.

PLANS_KEPT = 48
"""Four hours of plans."""


@transaction.atomic
def day_plan_store(*, plan: CapacityPlan, took_s: float, now: datetime) -> DayPlan:
    """Stores a plan, replacing one of the same time, and deletes old ones. Deployments and regions that were deleted
    meanwhile are omitted."""
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
    DayPlanPlace.objects.bulk_create(_plan_rows(row, plan))
    kept = DayPlan.objects.order_by("-at").values_list("pk", flat=True)[:PLANS_KEPT]
    DayPlan.objects.exclude(pk__in=list(kept)).delete()
    live.push("capacity-plan")
    return row


def _plan_rows(row: DayPlan, plan: CapacityPlan) -> Iterator[DayPlanPlace]:
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


# The pass of loop `traffic.plan`: forecasts, and the plan of the day that follows them.


class Planner:
    def __init__(self, forecaster: Forecaster | None = None, day: DayPlanner | None = None) -> None:
        self._forecaster = forecaster or Forecaster()
        self._day = day or DayPlanner()

    def run(self, *, now: datetime) -> bool:
        """Call it every few seconds. Returns True after new forecasts; a child process then makes the plan of the
        day."""
        has_new = self._forecaster.run_if_due(now=now) is not None
        if has_new:
            self._day.begin(now=now)
            region_losses_store(now=now)
        self._day.poll(now=now)
        return has_new

    def stop(self) -> None:
        self._day.stop()
