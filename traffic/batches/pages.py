"""Pages of batches: the list, one with its progress, rate, estimated end, downloads and cancel action, and the form for
an upload. They never show content; only operators download it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import BinaryIO, cast

from django.contrib.auth.views import redirect_to_login
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    Action,
    ActionMenu,
    ActionPage,
    Submission,
    Target,
    action_menu,
    action_page_view,
    action_view,
    page_target,
)
from controlplane.dashboard.charts import Band, Chart, Colour, Series
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.events import marked
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import Role, require
from kernel.refusals import InvalidInput
from kernel.tones import Tone
from traffic.batch_schedules.models import BatchRun
from traffic.batch_sinks.pages import deliveries_of_batch, delivery_list
from traffic.batches.models import Batch, BatchTimeline, StoredFile
from traffic.batches.planning.batch import (
    BATCH_TONE,
    ENDED,
    ENDPOINTS,
    HIGHEST_PRIORITY,
    OPEN,
    USUAL_PRIORITY,
    USUAL_WINDOW,
    BatchState,
)
from traffic.batches.planning.pacing import actual_rates, needed_lines, needed_rates
from traffic.batches.selectors import BatchStanding, batch_files, batch_standing, batches_described
from traffic.batches.services.for_operators import (
    BatchUpload,
    batch_cancel_for_operator,
    batch_create_for_operator,
    batch_file_open,
)
from traffic.files.api import file_download
from traffic.files.services.store import NoSuchFile, StoreAway
from traffic.keys.models import ApplicationKey

KEYS_OFFERED = 200
MAX_FORM_BYTES = 4 * 1000 * 1000
"""Of a file in the form. The web server refuses longer bodies without an application's key."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """`files`: its results and errors, `schedule`: the one that created it, both on its own page."""

    batch: Batch
    standing: BatchStanding
    files: Mapping[str, StoredFile] | None = None
    schedule: str = ""

    @property
    def state(self) -> BatchState:
        return BatchState(self.batch.state)

    @property
    def tone(self) -> Tone:
        return BATCH_TONE[self.state]

    @property
    def validated_percent(self) -> int | None:
        """While its input is validated and its size is known."""
        is_validating = self.state is BatchState.VALIDATING and self.batch.input_bytes
        return 100 * self.batch.validated_bytes // self.batch.input_bytes if is_validating else None

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
        batches = batches.filter(Q(id__startswith=text) | Q(tenant__icontains=text) | Q(lines_by_model__icontains=text))
    return batches


BATCH_LIST: List[BatchRow] = List(
    name="batches",
    columns=(
        Column("batch", "Batch", lambda row: row.batch.id, ("id",)),
        Column("state", "State", lambda row: row.batch.state, ("state",)),
        Column("tenant", "Tenant", lambda row: row.batch.tenant, ("tenant",)),
        Column("model", "Models", lambda row: row.batch.model_names, ("lines_by_model",), "wide"),
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
    if batch is None:
        return None
    run = BatchRun.objects.filter(batch=batch).first()
    return BatchRow(batch, batch_standing(batch, now), batch_files(batch, now), run.schedule_id if run else "")


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
    return BatchProgress(batch.id, marked(charts, deployment=batch.model), has_begun=True)


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
    lists=(BATCH_LIST,),
)

DELIVERIES_OF_BATCH = delivery_list(deliveries_of_batch, "")

BATCH = Page(
    section="batches",
    title="",
    fragments=(
        Fragment("batch", "", ("batches",), "traffic/batches/batch.html", _batch),
        Fragment("batch-progress", "Progress", ("batches",), "traffic/batches/progress.html", _progress),
        Fragment(
            "batch-deliveries",
            "Deliveries to sinks",
            ("batches",),
            "traffic/batch_sinks/deliveries.html",
            DELIVERIES_OF_BATCH.page,
        ),
    ),
    lists=(DELIVERIES_OF_BATCH,),
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


@never_cache
@require_GET
def batch_download(request: HttpRequest, key: str, name: str) -> HttpResponseBase:
    """The results or errors of a batch as JSONL."""
    if not request.user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    require(request, Role.OPERATOR)
    batch = _find(key)
    file = batch_file_open(batch=batch, name=name, actor=request.user.get_username(), now=clock.now())
    if file is None:
        raise Http404(f"Batch {batch.id} has no {name}, or they have expired.")
    try:
        return file_download(file, f'attachment; filename="{batch.id}-{name}.jsonl"')
    except NoSuchFile:
        raise Http404(f"The {name} of batch {batch.id} were deleted.") from None
    except StoreAway as away:
        return HttpResponse(f"{away}\n", status=503, content_type="text/plain; charset=utf-8")


def _upload(form: Submission, thing: None) -> HttpResponse:
    file = form.request.FILES.get("file")
    if file is None:
        raise InvalidInput(field="file", rule="required", message="choose a file, with one request per line")
    if (file.size or 0) > MAX_FORM_BYTES:
        message = f"the file has {file.size} bytes and may have {MAX_FORM_BYTES}; use switchyard batch submit"
        raise InvalidInput(field="file", rule="size", message=message)
    upload = BatchUpload(
        file=cast("BinaryIO", file.file),
        filename=str(file.name),
        key=form.text("key"),
        endpoint=form.text("endpoint"),
        window=form.text("window") or USUAL_WINDOW,
        priority=_priority(form.text("priority")),
    )
    return redirect("batch-page", key=batch_create_for_operator(upload=upload, actor=form.actor, now=form.now).id)


def _priority(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        message = f"priority is {text[:40]!r}; it must be a whole number from 0 to {HIGHEST_PRIORITY}"
        raise InvalidInput(field="priority", rule="range", message=message)
    return int(text)


def _upload_form(form: Submission, thing: None) -> Context:
    active = ApplicationKey.objects.filter(revoked_at=None).filter(Q(expires_at=None) | Q(expires_at__gt=form.now))
    return {
        "form": {name: form.text(name) for name in ("key", "endpoint", "window", "priority")},
        "keys": active.order_by("-id").only("prefix", "name", "tenant")[:KEYS_OFFERED],
        "endpoints": ENDPOINTS,
        "usual": {"window": USUAL_WINDOW, "priority": USUAL_PRIORITY, "highest": HIGHEST_PRIORITY},
        "most_bytes": MAX_FORM_BYTES,
    }


UPLOAD: Action[None] = Action(target=page_target("batches-page", "batches"), name="upload", run=_upload)
batch_new = action_page_view(ActionPage(action=UPLOAD, template="traffic/batches/new.html", context=_upload_form))
