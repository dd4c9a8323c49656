"""Tables of the flight recorder: rounds of control loops that decided something, and what they are about."""

from django.db import models


class RecordedRound(models.Model):
    """A round of a pass of a `loop` (`fleet.recorder.planning.loops`). `base`: the row with the whole snapshot that its
    `inputs` follow, in the order of IDs; None: its own are whole. `inputs`: `fleet.recorder.planning.encoding`; NULL
    once they were deleted. `schema`: digest of their types; `release`: the version of the control plane. `decided`:
    number of decisions that were applied; `reasons`: why, of the first of them."""

    loop = models.CharField(max_length=16)
    base = models.ForeignKey("self", on_delete=models.DO_NOTHING, null=True, related_name="followers")
    at = models.DateTimeField(db_index=True)
    planner = models.CharField(max_length=64)
    decided = models.PositiveIntegerField()
    reasons = models.JSONField(default=list)
    inputs = models.BinaryField(null=True)
    size = models.PositiveIntegerField(default=0)
    schema = models.CharField(max_length=16)
    release = models.CharField(max_length=64)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["loop", "-at"], name="round_of_loop")]

    def __str__(self) -> str:
        return f"round {self.pk}: {self.decided} decisions of {self.planner}"


class RoundSubject(models.Model):
    """An object that reasons of a round are about, such as `cell:c-1`. Its index gives the newest rounds about it in
    order, however many rounds there are."""

    round = models.ForeignKey(RecordedRound, on_delete=models.DO_NOTHING, related_name="subjects")
    subject = models.CharField(max_length=240)

    class Meta:
        indexes = [models.Index(fields=["subject", "-round"], name="round_subject")]

    def __str__(self) -> str:
        return f"{self.subject} in round {self.round_id}"
