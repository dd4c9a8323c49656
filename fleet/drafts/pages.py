"""Pages of plan drafts: documents gathered, reviewed like a pull request, and applied together. Reviewing changes
nothing: it is a preview of `controlplane.api.apply`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from django.contrib.auth.views import redirect_to_login
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from controlplane.api.apply.documents import documents_of, role_needed
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_apply, documents_preview
from controlplane.api.apply.planning import Document, revision_of
from controlplane.api.apply.present import present_of
from controlplane.api.apply.view import PreviewDocumentsSerializer, predicted_effects
from controlplane.cli.documents import parse_documents
from controlplane.cli.errors import Failure
from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    Action,
    ActionPage,
    Field,
    Submission,
    Target,
    action_page_view,
    action_view,
)
from controlplane.dashboard.fragments import Context, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.wizards import documents_as_yaml, errors_by_path
from controlplane.forecast_budget import FORECASTS
from controlplane.what_if import hourly_cost
from fleet.capacity.selectors import machine_prices
from fleet.drafts.models import PlanDraft
from fleet.drafts.services import (
    BYTES_MOST,
    DRAFTS_MOST,
    Documents,
    digest_of,
    draft_change,
    draft_create,
    draft_delete,
    draft_finish,
    draft_remove,
    in_order,
    merged,
    object_of,
    require_owner,
)
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.access import Role, require
from kernel.decoding import decode_json
from kernel.refusals import Conflict, InvalidInput, Refusal
from simulator.prediction import Forecast

DEEPEST = 30
"""Levels of a document."""
VALUES_MOST = 20_000
"""Of a text. Reading this many takes about a second."""
ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DraftList:
    rows: tuple[PlanDraft, ...]
    more: bool = False
    filtered: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """Predicted for one deployment. Costs are US dollars an hour, None without a price."""

    deployment: str
    forecast: Forecast
    cost_before: float | None
    cost_after: float | None


@dataclass
class Review:
    """A draft against the present. `problems`: why it cannot be applied."""

    draft: PlanDraft
    is_owner: bool
    result: ApplyResult | None = None
    problems: list[str] = field(default_factory=list)
    is_predicted: bool = False
    effects: list[Effect] = field(default_factory=list)
    not_predicted: str = ""
    denied: str = ""
    """Why this user may not apply it, or ""."""

    @property
    def objects(self) -> list[tuple[str, str]]:
        return [object_of(one) for one in self.draft.documents]

    @property
    def yaml(self) -> str:
        return documents_as_yaml(in_order(self.draft.documents))

    @property
    def digest(self) -> str:
        return digest_of(self.draft)

    @property
    def is_possible(self) -> bool:
        return self.result is not None and bool(self.result.plan.steps) and not self.problems


def read_yaml(*texts: str) -> Documents:
    """The valid documents of each text; those of a later one replace those of the same object. Raises InvalidInput with
    the line or path of what is wrong."""
    documents: Documents = []
    for text in texts:
        if len(text.encode(errors="replace")) > BYTES_MOST:
            raise _wrong(f"the text is too long; the limit is {BYTES_MOST:,} bytes")
        _check_shape(text)
        try:
            written = parse_documents([("line", text)]).documents
            found = decode_json(json.dumps(written))
        except Failure as failure:
            raise _wrong(re.sub(r"^line:(\d+)", r"line \1", str(failure))) from None
        except (ValueError, TypeError) as error:
            raise _wrong(str(error)) from None
        documents = merged(documents, _checked(found))
    return documents


def _check_shape(text: str) -> None:
    """Refuses nesting and links before the text is read: a few links can stand for gigabytes."""
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if count > VALUES_MOST:
                raise _wrong(f"line {line}: more than {VALUES_MOST:,} values")
            if isinstance(event, yaml.AliasEvent):
                raise _wrong(f"line {line}: links (*{str(event.anchor)[:40]}) are not read; write the value out")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DEEPEST:
                raise _wrong(f"line {line}: nested deeper than {DEEPEST} levels")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _wrong(f"line {line}: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise _wrong(str(error)) from None


def _checked(documents: Documents) -> Documents:
    if not documents:
        return []
    valid = PreviewDocumentsSerializer(data={"documents": documents})
    if not valid.is_valid():
        errors = [f"{path}: {text}" if path else text for path, text in errors_by_path(valid.errors)]
        hidden = f" (and {len(errors) - ERRORS_SHOWN} more)" if len(errors) > ERRORS_SHOWN else ""
        raise _wrong("; ".join(errors[:ERRORS_SHOWN]) + hidden)
    objects = [object_of(one) for one in documents]
    if doubled := next((one for one in objects if objects.count(one) > 1), None):
        raise _wrong(f"{' '.join(doubled)} is listed twice")
    return documents


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(field="yaml", rule="valid", message=message)


def _find(key: str) -> PlanDraft:
    return found_or_404(PlanDraft.objects.filter(key=key).first(), f"draft {key!r}")


def _own_drafts(request: PageRequest) -> DraftList:
    return DraftList(tuple(PlanDraft.objects.filter(owner=request.caller.user.get_username())[: 2 * DRAFTS_MOST]))


def _parsed(row: PlanDraft) -> tuple[Document, ...]:
    """Raises InvalidInput if a document is invalid by now, such as after an upgrade."""
    valid = PreviewDocumentsSerializer(data={"documents": _checked(row.documents)})
    valid.is_valid(raise_exception=True)
    return documents_of(valid.validated_data["documents"])


def _review(request: PageRequest) -> Review:
    row, user = _find(request.key), request.caller.user.get_username()
    review = Review(row, row.owner == user, is_predicted=bool(request.text("predict")))
    if row.applied_at is not None or not row.documents:
        return review
    requester = Requester(actor=user[:64], why="", now=request.now)
    try:
        documents = _parsed(row)
        if not request.caller.access.may(role := role_needed(documents)):
            review.denied = f"Applying it needs the {role} role. Send its link to a user with that role."
        review.result = documents_preview(documents=documents, requester=requester, with_fleet=False)
    except NotPossible as refused:
        review.problems = [f"{one.document.title}: {one.message}" for one in refused.objections]
    except Refusal as refusal:
        review.problems = [str(refusal)]
    else:
        if review.is_predicted:
            _predict(review, documents, requester, user)
    return review


def _predict(review: Review, documents: Sequence[Document], requester: Requester, user: str) -> None:
    try:
        with FORECASTS.take(user) as has_time:
            before = fleet_view(now=requester.now)
            result = documents_preview(documents=documents, requester=requester)
            forecasts, beyond = predicted_effects(result, requester.now, has_time)
    except (Refusal, NotPossible) as refusal:
        review.not_predicted = str(refusal)
        return
    review.effects = _effects(before, result, forecasts, requester)
    review.not_predicted = f"only {len(forecasts)} at a time; without {', '.join(beyond)}" if beyond else ""


def _effects(
    before: FleetView, result: ApplyResult, forecasts: Mapping[str, Forecast], requester: Requester
) -> list[Effect]:
    prices = machine_prices()
    after = result.fleet or before
    return [
        Effect(name, forecast, *(hourly_cost(view, name, prices, requester.now) for view in (before, after)))
        for name, forecast in forecasts.items()
    ]


TARGET: Target[PlanDraft] = Target(
    noun="draft",
    find=_find,
    name=lambda row: row.name,
    url=lambda row: reverse("plan-draft", args=(row.key,)),
    action_url=lambda row, name: reverse("plan-draft-action", args=(row.key, name)),
)


def _apply(form: Submission, row: PlanDraft) -> HttpResponse:
    """Applies the reviewed draft and marks it as applied in one transaction; a repeated submit changes nothing."""
    digest, revision = form.text("digest"), form.text("revision")
    if not digest or not revision:
        raise Conflict("open the draft and review it first")
    user = form.request.user.get_username()
    requester = Requester(actor=form.actor, why=form.text("why"), now=form.now)
    try:
        with transaction.atomic():
            finished = draft_finish(key=row.key, digest=digest, actor=user, now=form.now)
            if finished is None:
                return redirect(TARGET.url(row))
            documents = _parsed(finished)
            require(form.request, role_needed(documents))
            applied = documents_apply(documents=documents, requester=requester, revision=revision)
    except NotPossible as refused:
        raise Conflict(str(refused)) from None
    return redirect("approvals") if applied.waiting else redirect(TARGET.url(row))


def _apply_fields(row: PlanDraft) -> tuple[Field, ...]:
    try:
        revision = revision_of(present_of(_parsed(row))) if row.documents else ""
    except InvalidInput:
        revision = ""
    guards = (Field("digest", kind="hidden", value=digest_of(row)), Field("revision", kind="hidden", value=revision))
    return (*guards, REQUIRED_WHY)


def _why_not_apply(row: PlanDraft) -> str:
    return "It was applied." if row.applied_at else "" if row.documents else "It has no documents."


def _delete(form: Submission, row: PlanDraft) -> HttpResponse:
    draft_delete(key=row.key, actor=form.request.user.get_username())
    return redirect("plan-drafts")


def _remove(form: Submission, row: PlanDraft) -> None:
    user = form.request.user.get_username()
    draft_remove(key=row.key, actor=user, kind=form.text("kind"), name=form.text("name"), now=form.now)


APPLY = Action(
    target=TARGET,
    name="apply",
    label="Apply",
    run=_apply,
    fields=_apply_fields,
    effect=lambda row, now: "Applies all documents of this draft in one transaction, or none.",
    why_not=_why_not_apply,
)
DELETE = Action(
    target=TARGET,
    name="delete",
    label="Delete",
    run=_delete,
    effect=lambda row, now: "Deletes the draft. The fleet stays as it is.",
)
REMOVE = Action(target=TARGET, name="remove", label="Remove", run=_remove)
plan_draft_action = action_view(APPLY, DELETE, REMOVE)


def _texts(form: Submission) -> list[str]:
    """The typed text and the text of the uploaded file, as far as they exist."""
    typed = str(form.fields.get("yaml", "")).replace("\r\n", "\n")
    upload = form.request.FILES.get("file")
    if upload is None:
        return [typed]
    if (upload.size or 0) > BYTES_MOST:
        raise _wrong(f"the file has {upload.size:,} bytes; the limit is {BYTES_MOST:,}")
    try:
        return [typed, upload.read().decode()]
    except UnicodeDecodeError:
        raise _wrong("the file is not UTF-8 text") from None


def _name(form: Submission) -> str:
    return str(form.fields.get("name", "")).replace("\0", "")


def _create(form: Submission, thing: None) -> HttpResponse:
    documents, owner = read_yaml(*_texts(form)), form.request.user.get_username()
    return redirect(TARGET.url(draft_create(owner=owner, name=_name(form), documents=documents, now=form.now)))


def _change(form: Submission, row: PlanDraft) -> None:
    user = form.request.user.get_username()
    require_owner(row, user)
    documents = read_yaml(*_texts(form))
    draft_change(
        key=row.key, actor=user, name=_name(form), documents=documents, digest=form.text("digest"), now=form.now
    )


def _form(form: Submission, row: PlanDraft | None) -> Context:
    """What was typed, with the content of a readable file, or else the draft's documents."""
    if row is not None:
        require_owner(row, form.request.user.get_username())
    shown: dict[str, Any] = {"draft": row, "name": row.name if row else "", "yaml": "", "digest": ""}
    if row is not None:
        shown |= {"yaml": documents_as_yaml(in_order(row.documents)), "digest": digest_of(row)}
    if form.is_post:
        upload = form.request.FILES.get("file")
        filed = ""
        if upload is not None and (upload.size or 0) <= BYTES_MOST:
            upload.seek(0)
            filed = upload.read().decode(errors="replace")
        typed = str(form.fields.get("yaml", ""))
        shown |= {
            "name": _name(form),
            "yaml": "\n---\n".join(text for text in (typed, filed) if text),
            "digest": form.text("digest"),
        }
    return shown


NEW: Target[None] = Target(
    noun="draft", find=lambda: None, name=lambda thing: "drafts", url=lambda thing: reverse("plan-drafts")
)
plan_draft_new = action_page_view(
    ActionPage(
        action=Action(target=NEW, name="create", label="Create", run=_create),
        template="fleet/drafts/form.html",
        context=_form,
    )
)
plan_draft_edit = action_page_view(
    ActionPage(
        action=Action(target=TARGET, name="edit", label="Edit", run=_change),
        template="fleet/drafts/form.html",
        context=_form,
    )
)


@never_cache
@require_safe
def plan_draft_download(request: HttpRequest, key: str) -> HttpResponseBase:
    """The documents as a YAML file that `switchyard apply` reads."""
    if not request.user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    require(request, Role.OPERATOR)
    row = _find(key)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", row.name).strip("-.") or "draft"
    headers = {"Content-Disposition": f'attachment; filename="{name}.yaml"'}
    text = documents_as_yaml(in_order(row.documents))
    return HttpResponse(text, content_type="application/yaml; charset=utf-8", headers=headers)


PLAN_DRAFTS = Page(
    section="plan-drafts",
    title="Plan drafts",
    fragments=(Fragment("plan-drafts", "", (), "fleet/drafts/table.html", _own_drafts),),
    role=Role.OPERATOR,
)
PLAN_DRAFT = Page(
    section="plan-drafts",
    title="",
    # Without topics: the review must not change under the reader, and predictions cost time.
    fragments=(Fragment("plan-draft", "", (), "fleet/drafts/draft.html", _review),),
    role=Role.OPERATOR,
)
