"""Table of the flight recorder: rounds of the reconciler that decided something."""

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models


class RecordedRound(models.Model):
    """A round of a pass. `base`: the row with the whole snapshot that its `inputs` follow, in the order of IDs; None:
    its own are whole. `inputs`: `fleet.recorder.planning.encoding`; NULL once they were deleted. `schema`: digest of
    their types; `release`: the version of the control plane. `decided`: number of decisions that were applied;
    `reasons`: why, of the first of them; `subjects`: what these are about, such as `cell:c-1`."""

    base = models.ForeignKey("self", on_delete=models.DO_NOTHING, null=True, related_name="followers")
    at = models.DateTimeField(db_index=True)
    planner = models.CharField(max_length=64)
    decided = models.PositiveIntegerField()
    reasons = models.JSONField(default=list)
    subjects = ArrayField(models.CharField(max_length=240), default=list)
    inputs = models.BinaryField(null=True)
    size = models.PositiveIntegerField(default=0)
    schema = models.CharField(max_length=16)
    release = models.CharField(max_length=64)

    class Meta:
        ordering = ["-id"]
        indexes = [GinIndex(fields=["subjects"], name="round_subjects")]

    def __str__(self) -> str:
        return f"round {self.pk}: {self.decided} decisions of {self.planner}"
