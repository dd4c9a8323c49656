"""Ingresses and what they last said of themselves."""

from django.db import models

from fleet.models import Region


class Ingress(models.Model):
    """One HAProxy with its agent. Applications reach it at `address:port`."""

    id = models.CharField(max_length=64, primary_key=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="ingresses")
    address = models.CharField(max_length=64)
    port = models.PositiveIntegerField()
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "id"]

    def __str__(self) -> str:
        return self.id


class IngressReport(models.Model):
    """The last report of an ingress agent. `revision` is the table in force; `cells` maps cell -> up, down, drain."""

    ingress = models.OneToOneField(Ingress, on_delete=models.CASCADE, primary_key=True, related_name="report")
    connected = models.BooleanField(default=False)
    connection = models.CharField(max_length=40, blank=True)
    connection_changed_at = models.DateTimeField(null=True)
    last_seen_at = models.DateTimeField(null=True)
    revision = models.PositiveBigIntegerField(default=0)
    haproxy_pid = models.IntegerField(null=True)
    reason = models.TextField(blank=True)
    cells = models.JSONField(default=dict)
    telemetry = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"{self.ingress_id} at revision {self.revision}"
