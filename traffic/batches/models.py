"""Files of applications, batches over them, and leased ranges of lines. Requests and answers are in the file store,
never in rows."""

import secrets

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from kernel.tones import Tone
from traffic.batches.planning.batch import BATCH_TONE, OPEN, USUAL_PRIORITY, BatchState
from traffic.batches.planning.pacing import FIRST_STEP_S, Timeline
from traffic.files.planner import FilePurpose

OPEN_STATES = sorted(state.value for state in OPEN)


def new_file_id() -> str:
    """128 random bits, so that IDs cannot be guessed."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


class StoredFile(models.Model):
    """A file of one tenant; its bytes are in the file store as `files/<id>`. `lines` and `model` (of the first line)
    are from the upload and serve only estimates."""

    id = models.CharField(max_length=40, primary_key=True, default=new_file_id)
    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=16, choices=choices(FilePurpose))
    bytes = models.PositiveBigIntegerField()
    lines = models.PositiveIntegerField(default=0)
    model = models.CharField(max_length=200, blank=True)
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [models.Index(fields=["tenant", "created_at", "id"], include=["bytes"], name="file_of_tenant")]

    def __str__(self) -> str:
        return f"{self.id}: {self.filename}"


class Batch(models.Model):
    """A batch of one tenant. Its input is a file of the tenant or the object `input_uri`, whose validated content
    `input_etag` names.

    - `fence` numbers the leases on the batch itself, for validating and finalizing; `turn_at` is the last one.
      `validations` counts leases in a row whose validation failed.
    - `validated_lines` and `validated_bytes`, of `input_bytes`, are the progress of its validation.
    - `merged` is the progress of finalizing a long one (`planning.batch.Merged`).
    - `lines_by_model` is an estimate from the first line until the batch is validated; `lines` is its sum.
    - `expired`: the time ran out before all lines were done.
    - Counts are exact once the batch has ended; until then, add those of its ranges.
    - `at_risk_at`: when its deadline was first at risk and its owner was notified. `raised_at`: when its lines became
      near-real-time. `cells_asked_at`: when the plan of the day was asked for cells. `paced_at`: the last of these
      steps, after `paced_done` lines."""

    id = models.CharField(max_length=40, primary_key=True, default=new_batch_id)
    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="batches")
    endpoint = models.CharField(max_length=64)
    lines_by_model = models.JSONField(default=dict)
    input_file_id = models.CharField(max_length=40, blank=True)
    input_uri = models.CharField(max_length=1000, blank=True)
    input_etag = models.CharField(max_length=128, blank=True)
    input_bytes = models.PositiveBigIntegerField(default=0)
    output_uri = models.CharField(max_length=1000, blank=True)
    output_file_id = models.CharField(max_length=40, blank=True)
    error_file_id = models.CharField(max_length=40, blank=True)
    output_kept_s = models.PositiveIntegerField(null=True)
    window = models.CharField(max_length=8)
    priority = models.PositiveSmallIntegerField(default=USUAL_PRIORITY)
    metadata = models.JSONField(default=dict)
    errors = models.JSONField(default=list)
    state = models.CharField(max_length=16, choices=choices(BatchState), default=BatchState.VALIDATING.value)
    expired = models.BooleanField(default=False)
    fence = models.PositiveIntegerField(default=0)
    turn_at = models.DateTimeField(null=True)
    leased_until = models.DateTimeField(null=True)
    validations = models.PositiveSmallIntegerField(default=0)
    validated_lines = models.PositiveIntegerField(default=0)
    validated_bytes = models.PositiveBigIntegerField(default=0)
    merged = models.JSONField(default=dict)
    lines = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    expired_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)
    at_risk_at = models.DateTimeField(null=True)
    raised_at = models.DateTimeField(null=True)
    cells_asked_at = models.DateTimeField(null=True)
    paced_at = models.DateTimeField(null=True)
    paced_done = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(input_uri="") & ~Q(input_file_id="") | ~Q(input_uri="") & Q(input_file_id=""),
                name="batch_has_one_input",
            )
        ]
        indexes = [
            models.Index(fields=["tenant", "created_at", "id"], name="batch_of_tenant"),
            models.Index(fields=["expires_at"], name="batch_open", condition=Q(state__in=OPEN_STATES)),
        ]

    def __str__(self) -> str:
        return f"{self.id}: {self.state}"

    @property
    def tone(self) -> Tone:
        return BATCH_TONE[BatchState(self.state)]

    @property
    def model(self) -> str:
        """The model of all lines, or "" if it has several or is unknown."""
        return next(iter(self.lines_by_model)) if len(self.lines_by_model) == 1 else ""

    @property
    def model_names(self) -> str:
        return ", ".join(sorted(self.lines_by_model))


class BatchShard(models.Model):
    """Consecutive lines of the input of a batch that is validated, up to byte `end`. `fence` is the lease that wrote
    its work file and the file of its IDs, of which `id_slice_ends` lie before the end of each slice
    (`planning.shards`). `numbered` counts all lines of the input up to its end; `first_lines` is by model."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="shards")
    number = models.PositiveIntegerField()
    fence = models.PositiveIntegerField()
    end = models.PositiveBigIntegerField()
    numbered = models.PositiveIntegerField()
    lines = models.PositiveIntegerField()
    inputs = models.PositiveBigIntegerField()
    lines_by_model = models.JSONField(default=dict)
    first_lines = models.JSONField(default=dict)
    id_slice_ends = ArrayField(models.PositiveIntegerField(), default=list)
    errors = models.JSONField(default=list)
    errors_in_all = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["batch", "number"]
        constraints = [models.UniqueConstraint(fields=["batch", "number"], name="shard_once")]

    def __str__(self) -> str:
        return f"{self.batch_id} shard {self.number}"


class BatchTimeline(models.Model):
    """Progress of a batch: completed and failed lines every `step_s` seconds, of bounded length (`planning.pacing`).
    Null means no sample."""

    batch = models.OneToOneField(Batch, on_delete=models.CASCADE, primary_key=True, related_name="samples")
    step_s = models.PositiveIntegerField(default=FIRST_STEP_S)
    completed = ArrayField(models.PositiveIntegerField(null=True), default=list)
    failed = ArrayField(models.PositiveIntegerField(null=True), default=list)

    def __str__(self) -> str:
        return f"{self.batch_id}, every {self.step_s} s"

    def timeline(self) -> Timeline:
        return Timeline(self.step_s, tuple(self.completed), tuple(self.failed))


class BatchRange(models.Model):
    """Lines of one model of an open batch, as bytes `start` to `end` of the work file `work`. Each lease is one attempt
    and writes its own journal, named by `fence`; the counts cover all journals."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="ranges")
    number = models.PositiveIntegerField()
    model = models.CharField(max_length=200, blank=True)
    work = models.CharField(max_length=16, blank=True)
    start = models.PositiveBigIntegerField()
    end = models.PositiveBigIntegerField()
    lines = models.PositiveIntegerField()
    done = models.BooleanField(default=False)
    fence = models.PositiveIntegerField(default=0)
    leased_until = models.DateTimeField(null=True)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["batch", "number"]
        indexes = [models.Index(fields=["batch", "number"], name="range_open", condition=Q(done=False))]
        constraints = [models.UniqueConstraint(fields=["batch", "number"], name="range_once")]

    def __str__(self) -> str:
        return f"{self.batch_id} {self.number}"
