"""Keeps plans of the day: the newest is what counts, those before it show what was thought."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime

from django.db import transaction

from fleet.models import DayPlan, DayPlanPlace, DeploymentRegion
from fleet.planning.capacity.need import place_plan
from fleet.planning.capacity.view import CapacityPlan
from kernel import live

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
