"""Tables of ingresses, their reports, request holds for scale-to-zero, and published routing tables."""

from django.db import models

from engine_agent.protocol.ingress_messages import Withheld
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region


class Ingress(models.Model):
    """One HAProxy with its agent, reachable at `address:port`. The address is empty while its machine is launched.
    `zone` is the cloud zone that it was launched for."""

    id = models.CharField(max_length=64, primary_key=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="ingresses")
    address = models.CharField(max_length=64, blank=True)
    port = models.PositiveIntegerField()
    zone = models.CharField(max_length=32, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "id"]

    def __str__(self) -> str:
        return self.id


class IngressReport(models.Model):
    """Last report of an ingress agent. `revision` is the table in force; `cells` maps cell to up, down or drain.
    `started_at` is the last time that its provider was asked to start it or its agent."""

    ingress = models.OneToOneField(Ingress, on_delete=models.CASCADE, primary_key=True, related_name="report")
    connected = models.BooleanField(default=False)
    connection = models.CharField(max_length=40, blank=True)
    connection_changed_at = models.DateTimeField(null=True)
    last_seen_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    agent_version = models.CharField(max_length=32, blank=True)
    revision = models.PositiveBigIntegerField(default=0)
    haproxy_pid = models.IntegerField(null=True)
    reason = models.TextField(blank=True)
    cells = models.JSONField(default=dict)
    telemetry = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"{self.ingress_id} at revision {self.revision}"


class PoolHold(models.Model):
    """How ingresses hold requests for a deployment that scales to zero. `regions` may start its first cell; `ready_at`
    is when that cell is expected, in Unix seconds, or 0 if none is starting; `withheld` is why it gets no machines. The
    row applies while the deployment has a range."""

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, primary_key=True, related_name="pool_hold")
    for_s = models.PositiveIntegerField()
    cold_start_s = models.PositiveIntegerField()
    ready_at = models.PositiveBigIntegerField(default=0)
    regions = models.JSONField(default=list)
    withheld = models.CharField(max_length=16, choices=choices(Withheld), blank=True, default=Withheld.NOTHING)

    def __str__(self) -> str:
        return f"{self.deployment_id} for {self.for_s} s"


class RoutingTable(models.Model):
    """One revision of a region's routing table. Rows never change; the highest revision is in force."""

    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="routing_tables")
    revision = models.PositiveBigIntegerField()
    body = models.JSONField()
    reason = models.TextField()
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "-revision"]
        constraints = [models.UniqueConstraint(fields=["region", "revision"], name="table_revision_once")]

    def __str__(self) -> str:
        return f"{self.region_id} revision {self.revision}"
