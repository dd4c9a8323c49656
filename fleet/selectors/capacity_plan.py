"""The plan of the day: the newest, and what of it counts still."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from fleet.models import DayPlan, DayPlanPlace
from fleet.planning.capacity.need import FRESH_S, PlacePlan

Place = tuple[str, str]
"""Deployment, region."""


def newest_plan() -> DayPlan | None:
    """However old it is."""
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
