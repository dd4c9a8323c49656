"""Pages of plan drafts: documents gathered, reviewed like a pull request, and applied together. Reviewing changes
nothing: it is a preview of `controlplane.api.apply`."""

import re
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from controlplane.api.apply.documents import role_needed
from controlplane.api.apply.execution import NotPossible, Requester, documents_apply
from controlplane.api.apply.present import revisions_of
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
from controlplane.dashboard.fragments import Context, Fragment, Page
from controlplane.dashboard.lists import Column, List, plain
from controlplane.dashboard.wizards import documents_as_yaml
from fleet.drafts.models import PlanDraft
from fleet.drafts.pages.reading import parsed, read_yaml, stored_documents, wrong_yaml
from fleet.drafts.pages.review import draft_review, draft_revision, draft_what_if, find_draft
from fleet.drafts.services import (
    BYTES_MOST,
    digest_of,
    draft_change,
    draft_create,
    draft_delete,
    draft_finish,
    draft_remove,
    in_order,
    require_owner,
)
from kernel.access import Role, require
from kernel.refusals import Conflict

DRAFT_LIST: List[PlanDraft] = List(
    name="drafts",
    columns=(
        plain("name", "Draft", name="draft"),
        Column("state", "State", lambda row: "applied" if row.applied_at else "open", ("applied_at",)),
        Column("documents", "Documents", lambda row: len(row.documents), css="number"),
        plain("changed_at", "Changed", "number"),
    ),
    query=lambda request: PlanDraft.objects.filter(owner=request.caller.user.get_username()),
    order=("-changed_at", "key"),
    find=("name",),
)


TARGET: Target[PlanDraft] = Target(
    noun="draft",
    find=find_draft,
    name=lambda row: row.name,
    url=lambda row: reverse("plan-draft", args=(row.key,)),
    action_url=lambda row, name: reverse("plan-draft-action", args=(row.key, name)),
)


def _apply(form: Submission, row: PlanDraft) -> HttpResponse:
    """Applies the reviewed draft and marks it as applied in one transaction; a repeated submit changes nothing."""
    if row.applied_at is None:
        stored_documents(row)  # says which documents are no longer valid
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
            documents = stored_documents(finished)
            require(form.request, role_needed(documents))
            applied = documents_apply(documents=documents, requester=requester, revision=revision)
    except NotPossible as refused:
        raise Conflict(str(refused)) from None
    return redirect("approvals") if applied.waiting else redirect(TARGET.url(row))


def _apply_fields(row: PlanDraft) -> tuple[Field, ...]:
    revision = Field("revision", kind="hidden", value=draft_revision(row))
    guards = (Field("digest", kind="hidden", value=digest_of(row)), revision)
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
        raise wrong_yaml(f"the file has {upload.size:,} bytes; the limit is {BYTES_MOST:,}")
    try:
        return [typed, upload.read().decode()]
    except UnicodeDecodeError:
        raise wrong_yaml("the file is not UTF-8 text") from None


def _name(form: Submission) -> str:
    return str(form.fields.get("name", "")).replace("\0", "")


def _create(form: Submission, thing: None) -> HttpResponse:
    documents, owner = read_yaml(*_texts(form)), form.request.user.get_username()
    bases = revisions_of(parsed(documents))
    row = draft_create(owner=owner, name=_name(form), documents=documents, bases=bases, now=form.now)
    return redirect(TARGET.url(row))


def _change(form: Submission, row: PlanDraft) -> None:
    user = form.request.user.get_username()
    require_owner(row, user)
    documents = read_yaml(*_texts(form))
    draft_change(
        key=row.key,
        actor=user,
        name=_name(form),
        documents=documents,
        bases=revisions_of(parsed(documents)),
        digest=form.text("digest"),
        now=form.now,
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
    row = find_draft(key)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", row.name).strip("-.") or "draft"
    headers = {"Content-Disposition": f'attachment; filename="{name}.yaml"'}
    text = documents_as_yaml(in_order(row.documents))
    return HttpResponse(text, content_type="application/yaml; charset=utf-8", headers=headers)


PLAN_DRAFTS = Page(
    section="plan-drafts",
    title="Plan drafts",
    fragments=(Fragment("plan-drafts", "", (), "fleet/drafts/table.html", DRAFT_LIST.page),),
    lists=(DRAFT_LIST,),
    role=Role.OPERATOR,
)
PLAN_DRAFT = Page(
    section="plan-drafts",
    title="",
    # Without topics: the review must not change under the reader, and predictions cost time.
    fragments=(
        Fragment("plan-draft", "", (), "fleet/drafts/draft.html", draft_review),
        Fragment("draft-what-if", "What if, after this draft", (), "fleet/drafts/what_if.html", draft_what_if),
    ),
    role=Role.OPERATOR,
)
