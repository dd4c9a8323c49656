"""Ingresses with their reports and routing tables, and how requests are shared among regions: what operators laid down,
what is in force, and how it came to be."""

from django.db import models

from engine_agent.protocol.ingress_messages import Withheld
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from traffic.region_shares.planning.autopilot import ShiftKind
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind, TrafficPolicy, parse_traffic_policy


class Ingress(models.Model):
    """One HAProxy with its agent. Applications reach it at `address:port`; "": its machine is still being launched.
    `zone`: of its cloud, where it was launched for one."""

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
    """The last report of an ingress agent. `revision` is the table in force; `cells` maps cell -> up, down, drain.
    `started_at`: when its provider was last told to start it or its agent."""

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
    """A deployment that may have no cells because a request starts its first one: as ingresses are told. `regions` are
    those in which one may start; `ready_at`: when the first of those that start is expected, in seconds since 1970, 0
    while none does; `withheld`: what keeps it from machines. It counts while the deployment has a range."""

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, primary_key=True, related_name="pool_hold")
    for_s = models.PositiveIntegerField()
    cold_start_s = models.PositiveIntegerField()
    ready_at = models.PositiveBigIntegerField(default=0)
    regions = models.JSONField(default=list)
    withheld = models.CharField(max_length=16, choices=choices(Withheld), blank=True, default=Withheld.NOTHING)

    def __str__(self) -> str:
        return f"{self.deployment_id} for {self.for_s} s"


class RoutingTable(models.Model):
    """One revision of what a region's ingresses must do. Rows are never changed; the highest revision is in force."""

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


class TrafficRule(models.Model):
    """An operator's policy for one deployment's traffic. `stated` holds what differs from the defaults of
    `traffic.region_shares.planning.policy.TrafficPolicy`; `revision` is what changes compare and set."""

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
    """The shares in force of one deployment: `shares` maps origin -> serving region -> share.

    `revision` grows with every shift and is what shifts compare and set. `held`: why the last matrix is being kept
    though it may be wrong; "" while it is not. `figures` is what the last pass saw and expects, for pages.
    """

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
    """One change of a matrix, and why. `moved` is the share of all requests that went to another region."""

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
    """An operator's order, until `expires_at` or until an operator ends it. `deployment` null: every deployment.

    Of kind shares, `region` is the origin whose row is fixed to `shares`; of kind evacuation, the region to empty.
    """

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
    """The last minute of a deployment in a region: `samples` as rows of
    `traffic.region_shares.planning.load.Sample`, bounded
    by its `SAMPLES_MAX`, and `counters`, the last report of each ingress of the region, to take differences from.

    `served`, `unserved_since` and `refused_before` are what `traffic.region_shares.planning.load` noted at its last
    look."""

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
