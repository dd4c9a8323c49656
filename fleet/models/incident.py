"""Incidents: open faults with their evidence."""

from django.db import models

from fleet.planning.states import INCIDENT_TONE, IncidentState, choices
from kernel.tones import Tone


class Incident(models.Model):
    """A fault that an operator or a planner must heal. At most one is open per (kind, subject).

    `shadow`: its rule only reports what it would have done. `cohort` names what is alike in the machines that it was
    compared with. `seen_at`: when the fault was last there. `muted_until`: an operator dismissed it until then.
    """

    kind = models.CharField(max_length=64)
    subject = models.CharField(max_length=160)
    state = models.CharField(max_length=16, choices=choices(IncidentState), default=IncidentState.OPEN)
    summary = models.TextField()
    resolution = models.TextField(blank=True)
    region = models.CharField(max_length=64, blank=True)
    deployment = models.CharField(max_length=128, blank=True)
    cell = models.CharField(max_length=160, blank=True)
    node = models.CharField(max_length=64, blank=True)
    evidence = models.JSONField(default=dict, blank=True)
    cohort = models.CharField(max_length=200, blank=True)
    shadow = models.BooleanField(default=False)
    closed_by = models.CharField(max_length=64, blank=True)
    seen_at = models.DateTimeField(null=True)
    muted_until = models.DateTimeField(null=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["muted_until"], name="incident_muted")]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subject"],
                condition=models.Q(state=IncidentState.OPEN.value),
                name="incident_open_once",
            ),
        ]

    def __str__(self) -> str:
        return self.summary

    @property
    def tone(self) -> Tone:
        return Tone.IDLE if self.shadow else INCIDENT_TONE[IncidentState(self.state)]
