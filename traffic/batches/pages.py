"""Pages of batches: the list, and one with its progress, rate, estimated end and cancel action. They never show
content."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet
from django.urls import reverse

from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    Action,
    ActionMenu,
    Submission,
    Target,
    action_menu,
    action_view,
)
from controlplane.dashboard.charts import Band, Chart, Colour, Series
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.reconcile.planning.states import choices
from kernel.tones import Tone
from traffic.batches.models import Batch, BatchTimeline
from traffic.batches.planning.batch import BATCH_TONE, ENDED, OPEN, BatchState
from traffic.batches.planning.pacing import actual_rates, needed_lines, needed_rates
from traffic.batches.selectors import BatchStanding, batch_standing, batches_described
from traffic.batches.services.batch import batch_cancel_for_operator


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
        """Whether it will miss its deadline at its present rate."""
        end_at = self.standing.estimated_end_at
        return end_at is not None and end_at > self.batch.expires_at

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def _listed(request: PageRequest) -> "QuerySet[Batch]":
    batches, state, text = batches_described(), request.text("state"), request.text("q")
    if state == "open":
        batches = batches.filter(state__in=[each.value for each in OPEN])
    elif state:
        batches = batches.filter(state=state)
    if text:
        batches = batches.filter(Q(id__startswith=text) | Q(tenant__icontains=text) | Q(model__icontains=text))
    return batches


BATCH_LIST: List[BatchRow] = List(
    name="batches",
    columns=(
        Column("batch", "Batch", lambda row: row.batch.id, ("id",)),
        Column("state", "State", lambda row: row.batch.state, ("state",)),
        Column("tenant", "Tenant", lambda row: row.batch.tenant, ("tenant",)),
        Column("model", "Model", lambda row: row.batch.model, ("model",), "wide"),
        Column("lines", "Lines", lambda row: row.batch.lines, ("lines",), "number", is_newest_first=True),
        Column("done", "Done", lambda row: row.standing.percent, css="number"),
        Column("failed", "Failed", lambda row: row.standing.failed, css="number wide"),
        Column("rate", "Lines/s", lambda row: row.standing.lines_per_s, css="number wide"),
        Column("ends", "Ends about", lambda row: row.standing.estimated_end_at, css="number"),
    ),
    query=_listed,
    rows=lambda batches, now: [BatchRow(batch, batch_standing(batch, now)) for batch in batches],
    order=("-created_at", "-id"),
    filters=("state", "q"),
)


def batch_find(batch_id: str, now: datetime) -> BatchRow | None:
    batch = batches_described().filter(id=batch_id).first()
    return BatchRow(batch, batch_standing(batch, now)) if batch else None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Progress of a batch over time; without samples there are no charts."""

    batch: str
    charts: tuple[Chart, ...]
    has_begun: bool


def batch_progress(row: BatchRow) -> BatchProgress:
    batch, samples = row.batch, BatchTimeline.objects.filter(batch=row.batch).first()
    began_at = batch.in_progress_at
    if samples is None or began_at is None:
        return BatchProgress(batch.id, (), has_begun=began_at is not None)
    timeline, window_s = samples.timeline(), (batch.expires_at - began_at).total_seconds()
    late = (Band("overdue", batch.expires_at, None, Colour.BAD),)
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


CANCELLABLE = frozenset({BatchState.VALIDATING, BatchState.IN_PROGRESS})
CANCEL_EFFECT = "No more lines are sent. Its tenant can read completed lines."


def _filter(request: PageRequest) -> Filter:
    options = (("", "all"), ("open", "open"), *choices(BatchState))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="ID, tenant or model", text_name="q", text=request.text("q"), choices=(state,))


def _batch(request: PageRequest) -> BatchRow:
    return found_or_404(batch_find(request.key, request.now), f"batch {request.key!r}")


def _progress(request: PageRequest) -> BatchProgress:
    return batch_progress(request.once(_batch))


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_batch).batch, request.caller.access, CANCEL)


BATCHES = Page(
    section="batches",
    title="Batches",
    fragments=(Fragment("batches-table", "", ("batches",), "traffic/batches/table.html", BATCH_LIST.page),),
    narrow=_filter,
    export=BATCH_LIST.export,
)

BATCH = Page(
    section="batches",
    title="",
    fragments=(
        Fragment("batch", "", ("batches",), "traffic/batches/batch.html", _batch),
        Fragment("batch-progress", "Progress", ("batches",), "traffic/batches/progress.html", _progress),
    ),
    actions=_actions,
    charts=True,
)


def _find(key: str) -> Batch:
    return found_or_404(Batch.objects.filter(id=key).first(), f"batch {key!r}")


def _cancel(form: Submission, batch: Batch) -> None:
    batch_cancel_for_operator(batch_id=batch.id, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="batch",
    find=_find,
    name=lambda batch: batch.id,
    url=lambda batch: reverse("batch-page", args=(batch.id,)),
    action_url=lambda batch, name: reverse("batch-action", args=(batch.id, name)),
)


def _why_not_cancel(batch: Batch) -> str:
    state = BatchState(batch.state)
    if state in CANCELLABLE:
        return ""
    return "This batch has ended." if state in ENDED else "Its results are being written."


CANCEL = Action(
    target=TARGET,
    name="cancel",
    label="Cancel",
    run=_cancel,
    fields=(REQUIRED_WHY,),
    effect=lambda batch, now: CANCEL_EFFECT,
    why_not=_why_not_cancel,
)
batch_action = action_view(CANCEL)
