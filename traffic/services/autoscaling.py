"""Runs the autoscaler: looks at every place whose cells are a range, asks the planner, and has the fleet apply it.

No pass depends on the one before it but for what that wrote down; whatever is lost is decided again.
"""

import logging
from dataclasses import asdict
from datetime import datetime

from fleet.planning.autoscaling.planner import plan_scaling
from fleet.planning.autoscaling.view import ScaledPlace, ScalingView
from fleet.selectors.autoscaling import has_ranges
from fleet.services.autoscaling import ScalingLook, scaling_apply
from kernel.leases import lease_release, lease_take, this_holder
from traffic.selectors.autoscaling import ScaledDeployment, scaled_deployments
from traffic.services.pool_hold import pool_holds_follow

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
