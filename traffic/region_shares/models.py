"""Region shares: operators' policies and overrides, the shares in force, their history, the last minute of load, and
what the loss of a region would break."""

from datetime import datetime

from django.db import models

from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from kernel.tones import Tone
from traffic.region_shares.planning.autopilot import ShiftKind
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind, TrafficPolicy, parse_traffic_policy


class TrafficRule(models.Model):
    """An operator's traffic policy for one deployment. `stated` holds the fields that differ from the defaults of
    `TrafficPolicy`; `revision` is for compare-and-set."""

    deployment = models.OneToOneField(
        Deployment, on_delete=models.CASCADE, primary_key=True, related_name="traffic_rule"
    )
    stated = models.JSONField(default=dict)
    revision = models.PositiveIntegerField(default=1)
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"traffic policy of {self.deployment_id}"

    def policy(self) -> TrafficPolicy:
        return parse_traffic_policy(self.stated)


class TrafficMatrix(models.Model):
    """Region shares in force for one deployment: `shares` maps origin to serving region to share. `revision` grows with
    every shift and is for compare-and-set. `held` is why the last matrix is kept although it may be outdated, or empty.
    `figures` has the last pass's measurements and expectations, for pages."""

    deployment = models.OneToOneField(
        Deployment, on_delete=models.CASCADE, primary_key=True, related_name="traffic_matrix"
    )
    shares = models.JSONField(default=dict)
    revision = models.PositiveBigIntegerField(default=0)
    moved_at = models.DateTimeField(null=True)
    held = models.TextField(blank=True)
    held_since = models.DateTimeField(null=True)
    figures = models.JSONField(default=dict)
    looked_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.deployment_id} shares {self.revision}"


class TrafficShift(models.Model):
    """One change of a matrix. `moved` is the share of all requests that changed region."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="traffic_shifts")
    revision = models.PositiveBigIntegerField()
    kind = models.CharField(max_length=16, choices=choices(ShiftKind))
    shares = models.JSONField()
    moved = models.FloatField()
    reason = models.TextField()
    at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["deployment", "revision"], name="shift_once_per_revision")]

    def __str__(self) -> str:
        return f"{self.deployment_id} shares {self.revision}: {self.reason}"


class TrafficOverride(models.Model):
    """An operator's override, in force until `expires_at` or until an operator ends it; `deployment` null means every
    deployment. Of kind shares, `region` is the origin whose row is fixed to `shares`; of kind evacuation, it is the
    region to empty."""

    kind = models.CharField(max_length=16, choices=choices(OverrideKind))
    deployment = models.ForeignKey(
        Deployment, on_delete=models.CASCADE, null=True, blank=True, related_name="traffic_overrides"
    )
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="traffic_overrides")
    shares = models.JSONField(default=dict, blank=True)
    mode = models.CharField(max_length=8, choices=choices(EvacuationMode), blank=True)
    why = models.CharField(max_length=200)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    end_reason = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["ended_at"], name="override_ended")]

    def __str__(self) -> str:
        return f"{self.kind} {self.pk} of {self.region_id}"


class TrafficWindow(models.Model):
    """The last minute of a deployment in a region: `samples` are rows of `planning.load.Sample`, at most `SAMPLES_MAX`,
    and `counters` the last report of each ingress, from which differences are taken. `served`, `unserved_since` and
    `refused_before` carry the state of `planning.load` from pass to pass."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="traffic_windows")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="traffic_windows")
    samples = models.JSONField(default=list)
    counters = models.JSONField(default=dict)
    served = models.BooleanField(default=False)
    unserved_since = models.DateTimeField(null=True)
    refused_before = models.JSONField(default=dict)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["deployment", "region"], name="window_once_per_place")]

    def __str__(self) -> str:
        return f"{self.deployment_id} in {self.region_id}"


class RegionLoss(models.Model):
    """Shortages after the loss of a region at the peak of the next day, as of `made_at`, for `deployments` with a
    forecast. `shortages`: rows of `planning.losses.Shortage`, the largest first. `is_judged`: all forecasts are based
    on past errors."""

    region = models.OneToOneField(Region, on_delete=models.CASCADE, primary_key=True, related_name="loss")
    made_at = models.DateTimeField()
    deployments = models.PositiveIntegerField()
    is_judged = models.BooleanField()
    shortages = models.JSONField(default=list)

    class Meta:
        ordering = ["region_id"]

    def __str__(self) -> str:
        return f"loss of {self.region_id}"

    @property
    def tone(self) -> Tone:
        return Tone.WARN if self.shortages else Tone.OK

    @property
    def text(self) -> str:
        """`holds`, or the largest shortage in a sentence."""
        if not self.shortages:
            return "holds"
        worst, more = self.shortages[0], len(self.shortages) - 1
        at = datetime.fromisoformat(worst["at"])
        part = f"{worst['unplaced']:.0f} of {worst['load']:.0f} requests"
        lacks = f"{worst['deployment']} lacks room for {part} at {at:%H:%M} UTC"
        return f"{lacks}, and {more} more" if more else lacks
