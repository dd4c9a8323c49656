"""Tables of the autoscaler: the latest check of each place, its decisions with their regret, the latest plan of roles,
and the switch that pauses the autoscaler in the whole fleet."""

from django.db import models

from fleet.autoscaling.planning.needs import ScalingRule
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.autoscaling.planning.roles import RatioRule
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region


class ScalingState(models.Model):
    """The latest check of a deployment in a region where its cells are a range. `history`: rows of seconds since 1970
    and cells (`fleet.autoscaling.planning.needs.NeedSample`); `load`: observed figures by name; `needed`: None if
    unknown; `acting`: whether the number of cells follows `wanted`; `idle_since`: None while there are requests."""

    place = models.OneToOneField(
        DeploymentRegion, on_delete=models.CASCADE, related_name="scaling_state", primary_key=True
    )
    wanted = models.PositiveIntegerField()
    needed = models.PositiveIntegerField(null=True)
    rule = models.CharField(max_length=16, choices=choices(ScalingRule))
    reason = models.TextField()
    acting = models.BooleanField()
    load = models.JSONField(default=dict)
    history = models.JSONField(default=list)
    idle_since = models.DateTimeField(null=True)
    looked_at = models.DateTimeField()

    class Meta:
        ordering = ["place_id"]

    def __str__(self) -> str:
        return f"{self.wanted} cells wanted at place {self.place_id}"


class ScalingDecision(models.Model):
    """A decision that differs from the one before. `acted`: it was carried out; False in shadow mode. `observed_s` and
    the following columns are its regret so far, in seconds and cell-seconds (`fleet.autoscaling.planning.planner`). It
    grows until the place's next decision."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="scaling_decisions")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="scaling_decisions")
    at = models.DateTimeField()
    was = models.PositiveIntegerField()
    wanted = models.PositiveIntegerField()
    acted = models.BooleanField()
    rule = models.CharField(max_length=16, choices=choices(ScalingRule))
    reason = models.TextField()
    load = models.JSONField(default=dict)
    observed_s = models.FloatField(default=0.0)
    too_few_cell_s = models.FloatField(default=0.0)
    too_many_cell_s = models.FloatField(default=0.0)
    in_force_cell_s = models.FloatField(default=0.0)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["deployment", "region", "-id"], name="scaling_decisions_of_place")]

    def __str__(self) -> str:
        return f"{self.deployment_id} in {self.region_id}: {self.was} -> {self.wanted}"


class MetricReading(models.Model):
    """The latest value of a metric of CloudWatch for a place. `key`: of the metric
    (`fleet.autoscaling.planning.policy.CloudMetric`). `value` and `at`: of the newest complete period, kept when a
    later reading finds none. `problem`: of the latest reading, or ""."""

    place = models.ForeignKey(DeploymentRegion, on_delete=models.CASCADE, related_name="metric_readings")
    key = models.CharField(max_length=32)
    value = models.FloatField(null=True)
    at = models.DateTimeField(null=True)
    problem = models.TextField(blank=True)
    read_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["place", "key"], name="metric_reading_once")]

    def __str__(self) -> str:
        return f"{self.value} at place {self.place_id}"


class ScalingSwitch(models.Model):
    """The fleet's only row, once the switch was used. `paused`: the autoscaler changes nothing, whatever the policies
    say."""

    name = models.CharField(max_length=8, primary_key=True, default="fleet")
    paused = models.BooleanField()
    why = models.CharField(max_length=200, blank=True)
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    def __str__(self) -> str:
        return "paused" if self.paused else "on"


class RoleState(models.Model):
    """The latest plan of roles in a region. `mixed`, `prefill` and `decode`: target cells per role; `needed_…`: the
    minimum for the demand (None: unknown, or mixed is better); `carries` and `mixed_carries`: requests per second
    within both limits, as planned and with mixed cells only; `from_tokens`: uncached tokens from which decode cells
    hand a prompt over (null: the default); `acting`: whether the cells follow; `figures`: observed figures by name;
    `counted`: request totals of the cells at that time."""

    place = models.OneToOneField(
        DeploymentRegion, on_delete=models.CASCADE, related_name="role_state", primary_key=True
    )
    mixed = models.PositiveIntegerField()
    prefill = models.PositiveIntegerField()
    decode = models.PositiveIntegerField()
    needed_prefill = models.PositiveIntegerField(null=True)
    needed_decode = models.PositiveIntegerField(null=True)
    carries = models.FloatField(null=True)
    mixed_carries = models.FloatField(null=True)
    from_tokens = models.PositiveIntegerField(null=True)
    rule = models.CharField(max_length=16, choices=choices(RatioRule))
    reason = models.TextField()
    acting = models.BooleanField()
    figures = models.JSONField(default=dict)
    counted = models.JSONField(default=dict)
    looked_at = models.DateTimeField()

    class Meta:
        ordering = ["place_id"]

    def __str__(self) -> str:
        return f"{self.wanted} wanted at place {self.place_id}"

    @property
    def wanted(self) -> RoleSplit:
        return RoleSplit(self.mixed, self.prefill, self.decode)

    @property
    def needed(self) -> int | None:
        """Minimum number of cells for the demand."""
        if self.needed_prefill is None or self.needed_decode is None:
            return None
        return self.needed_prefill + self.needed_decode
