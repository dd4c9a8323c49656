"""The tables of day plans and of their rows for each deployment in a region."""

from django.contrib.postgres.fields import ArrayField
from django.db import models

from fleet.capacity.planning.view import PlacePlan
from fleet.deployments.models import Deployment
from fleet.regions.models import Region


class DayPlan(models.Model):
    """A plan of slots of `slot_s` seconds from `at` on (`fleet.capacity.planning.view.CapacityPlan`). `solver` and
    `why` no better one was used; `took_s`; `dollars` for each slot; `machines`, `orders` and `lacks` as their
    dataclasses."""

    at = models.DateTimeField(unique=True)
    made_at = models.DateTimeField()
    slot_s = models.PositiveIntegerField()
    solver = models.CharField(max_length=8)
    why = models.TextField(blank=True)
    took_s = models.FloatField()
    shifts = models.PositiveIntegerField()
    dollars = ArrayField(models.FloatField())
    machines = models.JSONField(default=list)
    orders = models.JSONField(default=list)
    lacks = models.JSONField(default=list)

    class Meta:
        ordering = ["-at"]

    def __str__(self) -> str:
        return f"plan from {self.at:%Y-%m-%d %H:%M} UTC on"

    @property
    def total(self) -> float:
        return round(sum(self.dollars), 2)


class DayPlanPlace(models.Model):
    """A plan's slots for a deployment in a region. `by_type`: cells by instance type; `cells`: all. Concurrent
    requests: expected, to cover, for batches (`budget`, empty without a forecast), and due. `start_up_s`: assumed start
    time of a cell."""

    plan = models.ForeignKey(DayPlan, on_delete=models.CASCADE, related_name="places")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="+")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="+")
    cells = ArrayField(models.PositiveIntegerField())
    by_type = models.JSONField(default=dict)
    expected = ArrayField(models.FloatField())
    cover = ArrayField(models.FloatField())
    budget = ArrayField(models.FloatField(), default=list)
    due = ArrayField(models.FloatField(), default=list)
    start_up_s = models.FloatField(default=0.0)

    class Meta:
        ordering = ["deployment_id", "region_id"]
        constraints = [models.UniqueConstraint(fields=["plan", "deployment", "region"], name="day_plan_place_once")]

    def __str__(self) -> str:
        return f"{self.deployment_id} in {self.region_id} by plan {self.plan_id}"

    def slots(self) -> PlacePlan:
        """Returns the planner's view. Its plan must be loaded."""
        return PlacePlan(
            self.plan.at,
            self.plan.slot_s,
            tuple(self.cells),
            tuple(self.expected),
            tuple(self.cover),
            tuple(self.budget),
            tuple(self.due),
            self.start_up_s,
        )
