"""Runs the autoscaler: looks at every place whose cells are a range, asks the planner, and has the fleet apply it.

No pass depends on the one before it but for what that wrote down; whatever is lost is decided again.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime

from fleet.models import Cell
from fleet.planning.autoscaling.planner import plan_scaling
from fleet.planning.autoscaling.policy import CellRange
from fleet.planning.autoscaling.view import ScaledPlace, ScalingView
from fleet.planning.hold import hold_s, may_be_empty, ready_at_s, stepped_s, withheld_by
from fleet.planning.roles.ratio import plan_ratio
from fleet.planning.states import CellState
from fleet.selectors.autoscaling import has_ranges
from fleet.selectors.snapshot import claim_of
from fleet.services.autoscaling import ScalingLook, scaling_apply
from fleet.services.role import RoleLook, role_apply
from kernel import wake_ups
from kernel.leases import lease_release, lease_take, this_holder
from traffic.models import PoolHold
from traffic.selectors.autoscaling import ScaledDeployment, scaled_deployments
from traffic.selectors.roles import planned_places

LEASE = "autoscaler"
PASS_LIMIT_S = 20.0
"""A pass takes tens of milliseconds; after this another controller may try."""

log = logging.getLogger(__name__)


def autoscaling_run(*, now: datetime) -> list[str]:
    """One pass over all deployments. Returns those whose cells change; nothing while another controller is at it.
    Without a range anywhere it is one query."""
    if not has_ranges():
        return []
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=PASS_LIMIT_S, now=now) is None:
        return []
    try:
        scaled, problems = scaled_deployments(now)
        for name, problem in problems.items():
            log.warning("%s is not scaled: %s", name, problem)
        looks = [look for one in scaled for look in _looks(one, now)]
        changed = scaling_apply(looks=looks, now=now) if looks else []
        pool_holds_follow(scaled=scaled, now=now)
        return changed
    finally:
        lease_release(name=LEASE, holder=holder, now=now)


def _looks(one: ScaledDeployment, now: datetime) -> list[ScalingLook]:
    places = {place.region: place for place in one.view.places}
    return [
        ScalingLook(
            place=one.rows[decision.region],
            acting=one.acting,
            decision=decision,
            load={
                "per_cell": _per_cell(one.view, places[decision.region]),
                "start_up_s": round(one.view.start_up_s, 1),
                **(_rounded(asdict(load)) if (load := places[decision.region].load) else {}),
            },
        )
        for decision in plan_scaling(one.view, now)
    ]


def _per_cell(view: ScalingView, place: ScaledPlace) -> float:
    """Requests at once of a cell there; the mean where they are not alike."""
    return round(view.at(place).per_cell, 2) if place.capacities else view.per_cell


def _rounded(load: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 2) for name, value in load.items()}


# Keeps what ingresses are told of deployments that may have no cells: for how long a request waits for the first
# one, when that is expected, and whether it may have machines at all. Only while the autoscaler would start one:
# else waiting would be for nothing.

_TOLD = ("for_s", "cold_start_s", "ready_at", "regions", "withheld")
_STARTS = (CellState.PENDING.value, CellState.STARTING.value)


def pool_holds_follow(*, scaled: Iterable[ScaledDeployment], now: datetime) -> bool:
    """Write what has changed; returns whether anything did, of which ingresses are then told."""
    held = {one.view.deployment: one for one in scaled if one.acting and may_be_empty(one.view.policy, _ranges(one))}
    there = {row.deployment_id: row for row in PoolHold.objects.all()}
    started = _started(held) if held else {}
    wanted = {name: _row(one, started.get(name, [])) for name, one in held.items()}
    gone = there.keys() - wanted.keys()
    changed = [row for name, row in wanted.items() if name not in there or not _is_same(row, there[name])]
    if gone:
        PoolHold.objects.filter(deployment__in=gone).delete()
    PoolHold.objects.bulk_create(
        changed,
        update_conflicts=True,
        unique_fields=["deployment"],
        update_fields=list(_TOLD),
    )
    if gone or changed:
        wake_ups.send("traffic.publish")
    return bool(gone or changed)


def _ranges(one: ScaledDeployment) -> list[CellRange]:
    return [place.range for place in one.view.places]


def _row(one: ScaledDeployment, started: list[datetime]) -> PoolHold:
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
    return all(getattr(row, name) == getattr(other, name) for name in _TOLD)


def _started(names: Iterable[str]) -> dict[str, list[datetime]]:
    """When the cells were created that start now."""
    started: dict[str, list[datetime]] = defaultdict(list)
    cells = Cell.objects.filter(deployment__in=list(names), state__in=_STARTS).order_by()
    for name, created_at in cells.values_list("deployment_id", "created_at"):
        started[name].append(created_at)
    return started


# Runs the planner of roles: looks at every place whose roles are planned, and has the fleet apply what is decided.

ROLES_LEASE = "role-planner"
ROLES_PASS_LIMIT_S = 20.0


def roles_plan(*, now: datetime) -> list[str]:
    """One pass. Returns the deployments whose cells change their roles; nothing while another controller is at it."""
    holder = this_holder()
    if lease_take(name=ROLES_LEASE, holder=holder, ttl_s=ROLES_PASS_LIMIT_S, now=now) is None:
        return []
    try:
        looks = [
            RoleLook(one.row, one.acting, plan_ratio(one.view), one.figures, one.counted) for one in planned_places(now)
        ]
        return sorted(
            {look.place.deployment_id for look in looks if role_apply(look=look, now=now) and look.sets_roles}
        )
    finally:
        lease_release(name=ROLES_LEASE, holder=holder, now=now)
