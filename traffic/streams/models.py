"""Tables of streams that may continue at other cells: the last totals of ingresses, and their growth by hour."""

from django.db import models

from fleet.deployments.models import Deployment
from fleet.regions.models import Region


class StreamTotal(models.Model):
    """The last totals that an ingress reported about a deployment (`engine_agent.protocol.stream_counts.PoolStreams`),
    of the count that `since` names."""

    ingress = models.CharField(max_length=64)
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="+")
    since = models.CharField(max_length=40)
    totals = models.JSONField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["ingress", "deployment"], name="stream_total_once")]

    def __str__(self) -> str:
        return f"streams of {self.deployment_id} at {self.ingress}"


class StreamHour(models.Model):
    """What the ingresses of a region counted about a deployment's streams in an hour from `at`."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="+")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField()
    counts = models.JSONField()

    class Meta:
        ordering = ["deployment_id", "region_id", "at"]
        constraints = [models.UniqueConstraint(fields=["deployment", "region", "at"], name="stream_hour_once")]

    def __str__(self) -> str:
        return f"streams of {self.deployment_id} in {self.region_id} from {self.at:%Y-%m-%d %H:%M}"
