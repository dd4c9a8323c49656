"""What the autoscaler last saw and wanted of each place, what it decided and what became of that, and the switch that
stops it for the whole fleet."""

from django.db import models

from fleet.models.deployment import Deployment, DeploymentRegion
from fleet.models.region import Region
from fleet.planning.autoscaling.view import ScalingRule
from fleet.planning.states import choices


class ScalingState(models.Model):
    """The last look at a deployment in a region where its cells are a range. `history`: rows of seconds since 1970 and
    cells, `fleet.planning.autoscaling.view.NeedSample`; `load`: what was seen, by name; `needed` None: nobody knows.
    `acting`: whether the number of cells follows; else it is what would be wanted. `idle_since`: since when nobody has
    asked; None: somebody did."""

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
    """A decision for another number of cells than the one before. `acted`: it was carried out; else it is of shadow.

    `observed_s` and what follows it are its regret so far, in seconds and cell-seconds: see
    `fleet.planning.autoscaling.regret`. It grows until the next decision of the place.
    """

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


class ScalingSwitch(models.Model):
    """The fleet's one row, once it was used. `paused`: the autoscaler sets nothing, whatever policies say."""

    name = models.CharField(max_length=8, primary_key=True, default="fleet")
    paused = models.BooleanField()
    why = models.CharField(max_length=200, blank=True)
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    def __str__(self) -> str:
        return "paused" if self.paused else "on"
