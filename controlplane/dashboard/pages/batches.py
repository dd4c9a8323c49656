"""The list of batches, and the page of one with its action."""

from django.http import Http404
from django.urls import reverse

from controlplane.dashboard.actions import REQUIRED_WHY, Action, ActionMenu, Submission, Target, action_view
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_labelled
from controlplane.dashboard.selectors.batches import (
    BatchList,
    BatchProgress,
    BatchRow,
    batch_find,
    batch_list,
    batch_progress,
)
from fleet.planning.states import choices
from traffic.models import Batch
from traffic.planning.batch import BatchState
from traffic.services.batch import batch_cancel_for_operator

CANCELLABLE = frozenset({BatchState.VALIDATING, BatchState.IN_PROGRESS})
CANCEL_EFFECT = "Nothing more of it is sent. Its tenant can read what was answered."


def _list(request: PageRequest) -> BatchList:
    return batch_list(state=request.text("state"), text=request.text("q"), now=request.now)


def _filter(request: PageRequest) -> Filter:
    options = (("", "all"), ("open", "open"), *choices(BatchState))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by id, tenant or model", text_name="q", text=request.text("q"), choices=(state,))


def _batch(request: PageRequest) -> BatchRow:
    row = batch_find(request.key, request.now)
    if row is None:
        raise Http404(f"There is no batch {request.key!r}.")
    return row


def _progress(request: PageRequest) -> BatchProgress:
    return batch_progress(request.once(_batch))


def _actions(request: PageRequest) -> ActionMenu:
    row = request.once(_batch)
    if row.state not in CANCELLABLE:
        return ActionMenu((), "This batch has ended." if row.has_ended else "Its results are being written.")
    url = reverse("batch-action", args=(row.batch.id, CANCEL.name))
    return ActionMenu((CANCEL.confirmation(row.batch, url, CANCEL_EFFECT),))


BATCHES = Page(
    section="batches",
    title="Batches",
    fragments=(Fragment("batches-table", "", ("batches",), "dashboard/batches/table.html", _list),),
    narrow=_filter,
)

BATCH = Page(
    section="batches",
    title="",
    fragments=(
        Fragment("batch", "", ("batches",), "dashboard/batches/batch.html", _batch),
        Fragment("batch-progress", "Progress", ("batches",), "dashboard/batches/progress.html", _progress),
        Fragment("batch-actions", "Actions", ("batches",), "dashboard/actions.html", _actions),
    ),
    charts=True,
)


def _find(key: str) -> Batch:
    row = Batch.objects.filter(id=key).first()
    if row is None:
        raise Http404(f"There is no batch {key!r}.")
    return row


def _cancel(form: Submission, batch: Batch) -> None:
    batch_cancel_for_operator(batch_id=batch.id, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="batch",
    find=_find,
    name=lambda batch: batch.id,
    url=lambda batch: reverse("batch-page", args=(batch.id,)),
)
CANCEL = Action(target=TARGET, name="cancel", label="Cancel", run=_cancel, fields=(REQUIRED_WHY,))
batch_action = action_view(CANCEL)
