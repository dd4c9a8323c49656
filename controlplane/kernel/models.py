"""Records that every app needs: what happened, and who may act. They know nothing of fleets or traffic."""

from django.db import models

from controlplane.kernel.tones import Tone


class Event(models.Model):
    """One thing that happened, written in the transaction that made it happen. The timeline of every page."""

    at = models.DateTimeField(db_index=True)
    kind = models.CharField(max_length=64, db_index=True)
    tone = models.CharField(max_length=8, choices=[(tone.value, tone.value) for tone in Tone], default=Tone.IDLE)
    message = models.TextField()
    actor = models.CharField(max_length=64, default="switchyard")
    region = models.CharField(max_length=64, blank=True)
    deployment = models.CharField(max_length=128, blank=True)
    cell = models.CharField(max_length=160, blank=True)
    node = models.CharField(max_length=64, blank=True)
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["cell", "-id"], name="event_cell"),
            models.Index(fields=["node", "-id"], name="event_node"),
            models.Index(fields=["deployment", "-id"], name="event_deployment"),
        ]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Lease(models.Model):
    """The right to do something alone until `expires_at`. `token` grows with every change of holder, and fences."""

    name = models.CharField(max_length=96, primary_key=True)
    holder = models.CharField(max_length=96)
    token = models.BigIntegerField(default=1)
    acquired_at = models.DateTimeField()
    renewed_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder} until {self.expires_at:%H:%M:%S}"
