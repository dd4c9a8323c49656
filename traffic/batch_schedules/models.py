"""Schedules of batches, and their runs."""

from django.db import models
from django.db.models import Q

from fleet.reconcile.planning.states import choices
from kernel.tones import Tone
from traffic.batch_schedules.planner import RUN_TONE, MissedRuns, Overlap, RunState
from traffic.batches.models import Batch
from traffic.batches.planning.batch import ENDPOINTS, USUAL_PRIORITY, USUAL_WINDOW
from traffic.keys.models import ApplicationKey

SETTABLE = (
    "cron", "time_zone", "prefix", "marker", "quiet_s", "input", "output_uri", "sinks", "endpoint", "region", "window",
    "priority", "overlap", "missed", "paused",
)  # fmt: skip
"""Columns that operators set."""


class BatchSchedule(models.Model):
    """Creates batches of a key at the times of `cron`, or for each object below `prefix`.

    - `next_at`: the next time, or the next listing; null while paused. Times up to `checked_until` have runs.
    - `cursor`: the last key of an incomplete listing. `problem`: why the last listing or run did not succeed."""

    name = models.SlugField(max_length=64, primary_key=True)
    key = models.ForeignKey(ApplicationKey, on_delete=models.PROTECT, to_field="prefix", related_name="schedules")
    cron = models.CharField(max_length=100, blank=True, help_text="Minute, hour, day of the month, month, weekday.")
    time_zone = models.CharField(max_length=64, default="UTC", help_text="Of `cron` and of times in addresses.")
    prefix = models.CharField(
        max_length=1000,
        blank=True,
        help_text="Instead of `cron`: each object `s3://bucket/prefix/….jsonl` is an input.",
    )
    marker = models.CharField(
        max_length=64,
        blank=True,
        help_text="An object is complete once this one exists: `_SUCCESS` in its folder, or `.done` after its name.",
    )
    quiet_s = models.PositiveIntegerField(
        default=60, help_text="Without a marker, an object is complete if it did not change for these seconds."
    )
    input = models.CharField(
        max_length=1000, blank=True, help_text="With `cron`: `s3://bucket/in/{date}.jsonl`, or the ID of a file."
    )
    output_uri = models.CharField(
        max_length=1000, blank=True, help_text="Second destination of results, such as `s3://bucket/out/{date}`."
    )
    sinks = models.JSONField(default=list, help_text="Names of sinks that get the results.")
    endpoint = models.CharField(
        max_length=64,
        choices=[(each, each) for each in ENDPOINTS],
        default=ENDPOINTS[0],
        help_text="`url` of every line.",
    )
    region = models.CharField(max_length=64, blank=True, help_text="Region that sends the lines. Empty: any.")
    window = models.CharField(max_length=8, default=USUAL_WINDOW, help_text="Time to complete, 10m to 7d.")
    priority = models.PositiveSmallIntegerField(default=USUAL_PRIORITY, help_text="0 to 9, the most urgent.")
    overlap = models.CharField(
        max_length=8,
        choices=choices(Overlap),
        default=Overlap.WAIT.value,
        help_text="While the batch of an earlier run is open: wait for its end, skip the time, or allow both.",
    )
    missed = models.CharField(
        max_length=8,
        choices=choices(MissedRuns),
        default=MissedRuns.ONCE.value,
        help_text="Times that passed while no control plane ran: skip them, run once, or run all, up to 100.",
    )
    paused = models.BooleanField(default=False, help_text="Times that pass meanwhile have no run.")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()
    next_at = models.DateTimeField(null=True)
    checked_until = models.DateTimeField()
    cursor = models.CharField(max_length=1024, blank=True)
    problem = models.TextField(blank=True)

    class Meta:
        ordering = ["name"]
        indexes = [models.Index(fields=["next_at"], name="schedule_due", condition=Q(next_at__isnull=False))]
        constraints = [
            models.CheckConstraint(
                condition=Q(cron="") & ~Q(prefix="") | ~Q(cron="") & Q(prefix=""), name="schedule_has_one_source"
            )
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def state(self) -> str:
        return "paused" if self.paused else "waiting" if self.problem else "active"

    @property
    def tone(self) -> Tone:
        return Tone.IDLE if self.paused else Tone.WARN if self.problem else Tone.OK

    @property
    def when(self) -> str:
        return f"{self.cron} {self.time_zone}" if self.cron else f"objects in {self.prefix}"


class BatchRun(models.Model):
    """A time of a schedule, or an object in one version, which is an input once."""

    schedule = models.ForeignKey(BatchSchedule, on_delete=models.CASCADE, related_name="runs")
    due_at = models.DateTimeField()
    uri = models.CharField(max_length=1100, blank=True)
    etag = models.CharField(max_length=128, blank=True)
    state = models.CharField(max_length=8, choices=choices(RunState), default=RunState.WAITING.value)
    reason = models.TextField(blank=True)
    batch = models.OneToOneField(Batch, on_delete=models.SET_NULL, null=True, related_name="run")
    started_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-due_at", "-id"]
        indexes = [
            models.Index(fields=["schedule", "due_at", "id"], name="run_of_schedule"),
            models.Index(fields=["schedule", "due_at"], name="run_waiting", condition=Q(state=RunState.WAITING.value)),
        ]
        constraints = [
            models.UniqueConstraint(fields=["schedule", "due_at"], name="run_once_by_time", condition=Q(uri="")),
            models.UniqueConstraint(fields=["schedule", "uri", "etag"], name="run_once", condition=~Q(uri="")),
        ]

    def __str__(self) -> str:
        return f"{self.schedule_id} at {self.due_at:%Y-%m-%d %H:%M}"

    @property
    def tone(self) -> Tone:
        return RUN_TONE[RunState(self.state)]
