"""Routing tables: what the ingresses of a region are told."""

from django.db import models

from fleet.models import Region


class RoutingTable(models.Model):
    """One revision of what a region's ingresses must do. Rows are never changed; the highest revision is in force."""

    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="routing_tables")
    revision = models.PositiveBigIntegerField()
    body = models.JSONField()
    reason = models.TextField()
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "-revision"]
        constraints = [models.UniqueConstraint(fields=["region", "revision"], name="table_revision_once")]

    def __str__(self) -> str:
        return f"{self.region_id} revision {self.revision}"
