"""Batches as their pages show them: how far each is, how fast, and when about it ends. Nothing of their content."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from controlplane.dashboard.charts import Band, Chart, Colour, Series
from kernel.tones import Tone
from traffic.models import Batch, BatchTimeline
from traffic.planning.batch import BATCH_TONE, ENDED, OPEN, BatchState
from traffic.planning.batch_timeline import actual_rates, needed_lines, needed_rates
from traffic.selectors.batch import BatchStanding, batch_standing, batches_described

BATCHES_SHOWN = 100


@dataclass(frozen=True, slots=True)
class BatchRow:
    batch: Batch
    standing: BatchStanding

    @property
    def state(self) -> BatchState:
        return BatchState(self.batch.state)

    @property
    def tone(self) -> Tone:
        return BATCH_TONE[self.state]

    @property
    def is_late(self) -> bool:
        """Whether it ends after its time at the rate that it has."""
        end_at = self.standing.estimated_end_at
        return end_at is not None and end_at > self.batch.expires_at

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class BatchList:
    rows: tuple[BatchRow, ...]
    more: bool
    filtered: bool


def batch_list(*, state: str, text: str, now: datetime) -> BatchList:
    batches = batches_described().order_by("-created_at", "-id")
    if state == "open":
        batches = batches.filter(state__in=[each.value for each in OPEN])
    elif state:
        batches = batches.filter(state=state)
    if text:
        batches = batches.filter(Q(id__startswith=text) | Q(tenant__icontains=text) | Q(model__icontains=text))
    found = list(batches[: BATCHES_SHOWN + 1])
    rows = tuple(BatchRow(batch, batch_standing(batch, now)) for batch in found[:BATCHES_SHOWN])
    return BatchList(rows, len(found) > BATCHES_SHOWN, bool(state or text))


def batch_find(batch_id: str, now: datetime) -> BatchRow | None:
    batch = batches_described().filter(id=batch_id).first()
    return BatchRow(batch, batch_standing(batch, now)) if batch else None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch was over time; no charts: nobody has looked yet."""

    batch: str
    charts: tuple[Chart, ...]
    has_begun: bool


def batch_progress(row: BatchRow) -> BatchProgress:
    batch, samples = row.batch, BatchTimeline.objects.filter(batch=row.batch).first()
    began_at = batch.in_progress_at
    if samples is None or began_at is None:
        return BatchProgress(batch.id, (), has_begun=began_at is not None)
    timeline, window_s = samples.timeline(), (batch.expires_at - began_at).total_seconds()
    late = (Band("its time is over", batch.expires_at, None, Colour.BAD),)
    ends_at = began_at + timedelta(seconds=timeline.step_s * (len(timeline.completed) - 1))
    bands = late if ends_at > batch.expires_at else ()
    lines = (
        Series("answered", timeline.completed),
        Series("failed", timeline.failed, Colour.BAD),
        Series("needed", needed_lines(timeline, batch.lines, window_s), Colour.IDLE, dashed=True),
    )
    rates = (
        Series("actual", actual_rates(timeline)),
        Series("needed", needed_rates(timeline, batch.lines, window_s), Colour.IDLE, dashed=True),
    )
    charts = (
        Chart("batch-lines", "Lines with an outcome", "lines", began_at, timeline.step_s, lines, bands, decimals=0),
        Chart("batch-rate", "Rate", "lines/s", began_at, timeline.step_s, rates, bands, decimals=2),
    )
    return BatchProgress(batch.id, charts, has_begun=True)
