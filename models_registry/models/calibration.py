"""Calibrations of what versions guess. The database refuses to change one; the newest of a version counts."""

from django.db import models

from models_registry.models.version import ModelVersion


class SpeculationCalibration(models.Model):
    """How often the guesses of a version's heads are right, and how much it should guess.

    `document` is what the trainer wrote (`models_registry.planning.calibration`), `step_costs` what steps cost by kind
    of machine (`models_registry.planning.speculation_choice`). `figures` (by task) and `choices` (by task and kind of
    machine) follow from them.
    """

    version = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="calibrations")
    document = models.JSONField()
    step_costs = models.JSONField(default=list, blank=True)
    figures = models.JSONField()
    choices = models.JSONField(default=list, blank=True)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"calibration {self.pk} of {self.version}"
