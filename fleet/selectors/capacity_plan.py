"""The plan of the day: the newest, and what of it counts still."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from fleet.models import DayPlan, DayPlanPlace, DeploymentRegion
from fleet.planning.autoscaling.policy import ScalingMode
from fleet.planning.capacity.need import FRESH_S, PlacePlan
from fleet.planning.snapshot import PlannedPlaceCells
from fleet.selectors.autoscaling import scaling_mode, scaling_switch

Place = tuple[str, str]
"""Deployment, region."""


def newest_plan() -> DayPlan | None:
    return DayPlan.objects.order_by("-at").first()


def place_plans(now: datetime, deployments: Iterable[str] | None = None) -> dict[Place, PlacePlan]:
    """What the newest plan has for places, of all deployments or of these; none where it is too old to go by. Two
    queries, and one where there is none."""
    plan = DayPlan.objects.filter(at__gt=now - timedelta(seconds=FRESH_S), at__lte=now).order_by("-at").first()
    if plan is None:
        return {}
    rows = DayPlanPlace.objects.filter(plan=plan).select_related("plan")
    if deployments is not None:
        rows = rows.filter(deployment__in=list(deployments))
    return {(row.deployment_id, row.region_id): row.slots() for row in rows}


PLANNED_CELLS_OF = ("fleet_dayplan", "fleet_scalingswitch", "fleet_deployment", "fleet_deploymentregion")
"""Tables that `planned_place_cells` reads; what a plan has of places is never written without the plan."""


def planned_place_cells() -> tuple[PlannedPlaceCells, ...]:
    """What the newest plan has where the autoscaler acts, however old it is; nothing while it is paused. Two queries
    where there is no plan, four else."""
    plan = None if scaling_switch().paused else newest_plan()
    if plan is None:
        return ()
    ranged = DeploymentRegion.objects.filter(cells_max__isnull=False).select_related("deployment")
    acting = {
        (row.deployment_id, row.region_id): row.deployment.instance_types
        for row in ranged
        if scaling_mode(row.deployment) is ScalingMode.ACT
    }
    return tuple(
        PlannedPlaceCells(
            row.deployment_id, row.region_id, plan.at, plan.slot_s, tuple(row.by_type[kind]), row.start_up_s, kind
        )
        for row in plan.places.all()
        for kind in acting.get((row.deployment_id, row.region_id), ())
        if kind in row.by_type and row.budget
    )
