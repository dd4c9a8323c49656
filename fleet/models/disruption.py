"""The disruption ledger: every available cell taken down on purpose, from that step until it is back or gone."""

from django.db import models

from fleet.models.cell import Cell
from fleet.models.deployment import Deployment
from fleet.models.region import Region
from fleet.models.rollout import Rollout
from fleet.planning.states import DisruptionCause, choices


class Disruption(models.Model):
    """One entry, written in the transaction of the step that takes the cell down (I10)."""

    cell = models.ForeignKey(Cell, on_delete=models.CASCADE, related_name="disruptions")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="disruptions")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="disruptions")
    cause = models.CharField(max_length=16, choices=choices(DisruptionCause))
    rollout = models.ForeignKey(Rollout, on_delete=models.SET_NULL, null=True, related_name="disruptions")
    reason = models.TextField()
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["region"], name="disruption_open", condition=models.Q(closed_at__isnull=True))]
        constraints = [
            models.UniqueConstraint(
                fields=["cell"], condition=models.Q(closed_at__isnull=True), name="disruption_open_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.cell_id} down for {self.cause}"
