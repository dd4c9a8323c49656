"""Validations: the reading of a draft's artifacts, and what was found."""

from django.db import models

from kernel.tones import Tone
from models_registry.models.version import ModelVersion
from models_registry.planning.lifecycle import VALIDATION_TONE, ValidationState, choices


class Validation(models.Model):
    """One attempt to show that a draft can be served; at most one of a version is running.

    `version_revision` is the draft's as it was looked at. `checked` holds, while it runs, the digests of the files that
    were read: artifact URI -> path -> hexadecimal SHA-256, so that a crash costs one file. `troubles` counts how often
    a source did not answer. `evidence` is what was found, once it has passed.
    """

    version = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="validations")
    version_revision = models.PositiveIntegerField()
    state = models.CharField(max_length=16, choices=choices(ValidationState), default=ValidationState.RUNNING.value)
    reason = models.TextField(blank=True)
    actor = models.CharField(max_length=64)
    files_total = models.PositiveIntegerField(default=0)
    files_done = models.PositiveIntegerField(default=0)
    bytes_total = models.BigIntegerField(default=0)
    bytes_done = models.BigIntegerField(default=0)
    checked = models.JSONField(default=dict, blank=True)
    troubles = models.PositiveIntegerField(default=0)
    evidence = models.JSONField(default=dict, blank=True)
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["version"],
                condition=models.Q(state=ValidationState.RUNNING.value),
                name="validation_running_once",
            ),
        ]

    def __str__(self) -> str:
        return f"validation {self.pk} of {self.version}"

    @property
    def tone(self) -> Tone:
        return VALIDATION_TONE[ValidationState(self.state)]

    @property
    def percent(self) -> float:
        """How much of the artifacts was read, in percent; 0 while nobody knows how much there is."""
        return 100.0 * self.bytes_done / self.bytes_total if self.bytes_total else 0.0
