"""The one view of all wizards: shows the form with its documents, answers checks, and ends with a download, a plan
draft, a request for approval or an apply. It never writes: services do."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters

from accounts.permissions import FactorNeeded, require_fresh_factor
from controlplane.api.apply.documents import role_needed, takes_fresh_factor
from controlplane.api.apply.execution import NotPossible, Requester, documents_apply, documents_preview
from controlplane.api.apply.planning import Kind
from controlplane.api.apply.present import revisions_of
from controlplane.api.apply.view import predicted_effects
from controlplane.dashboard.actions import Submission, to_confirmation
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, View, page_view, shell_context
from controlplane.dashboard.wizard_checks import Checked, check
from controlplane.dashboard.wizard_conflicts import BASE, base_of, has_stored, note_conflicts, settled, stored_texts
from controlplane.dashboard.wizards import (
    RAW,
    RAW_TEXT,
    Documents,
    Input,
    InputKind,
    Option,
    Typed,
    Wizard,
)
from controlplane.forecast_budget import FORECASTS
from fleet.drafts.services import draft_add
from kernel import clock
from kernel.access import require
from kernel.refusals import Busy, Conflict, Refusal

MAX_URL = 4000
"""Characters of fields that a login page carries in its URL; longer ones return from the browser's own store."""
KEEPS = frozenset({"typed", "stored"})
"""Buttons that settle conflicts: which values stay."""
OWN_FIELDS = frozenset({"csrfmiddlewaretoken", "submission", "go", "pick", "revision"})


def wizard_view(wizard: Wizard, shell: Fragment) -> View:
    """GET shows the form, with fields from the query. POST checks, reviews, downloads or applies it (`go`)."""
    page = Page(section=wizard.section, title=wizard.title, fragments=())
    shell_view = page_view(page, shell)

    @never_cache
    @sensitive_post_parameters()
    def view(request: HttpRequest, key: str = "") -> HttpResponseBase:
        is_shell = request.headers.get("HX-Target") == shell.name
        if not request.user.is_authenticated:
            # The navigation must not lead away from what was typed.
            return HttpResponse(status=204) if is_shell else _signed_out(wizard, request)
        if is_shell:
            return shell_view(request, key)
        require(request, wizard.role)
        if request.method not in {"GET", "HEAD", "POST"}:
            return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
        form = Submission(request, clock.now())
        page_request = PageRequest(key, request.GET, form.now)
        typed = _typed(wizard, form, page_request)
        go = _pressed(form, "go")
        if go in KEEPS and has_stored(wizard, page_request):
            typed = settled(wizard, typed, page_request, takes_stored=go == "stored")
        if go == "apply":
            return _apply(wizard, form, typed, page_request, shell)
        checked = _check(wizard, form, typed, page_request)
        if go == "review" and checked.is_ready:
            _foresee(checked, form)
        if go == "download" and checked.documents and not checked.errors:
            return _download(wizard, checked)
        if go == "draft" and checked.is_ready and not wizard.is_private:
            try:
                owner, bases = request.user.get_username(), revisions_of(checked.parsed)
                row = draft_add(owner=owner, documents=checked.documents, bases=bases, now=form.now)
                return redirect("plan-draft", row.key)
            except Refusal as refusal:
                checked.add("", str(refusal))
        return _render(wizard, form, typed, checked, page_request, shell)

    return view


def _is_check(request: HttpRequest) -> bool:
    return "HX-Request" in request.headers


def _pressed(form: Submission, name: str) -> str:
    """The value of the pressed button. A check has none, whatever its fields say."""
    return form.text(name) if form.is_post and not _is_check(form.request) else ""


def _typed(wizard: Wizard, form: Submission, page_request: PageRequest) -> Typed:
    if form.is_post:
        typed = Typed(form.fields)
        value = _pressed(form, "pick")
        picked: dict[str, str | list[str]] = dict(wizard.pick(typed, value)) if value else {}
    else:
        typed = Typed(QueryDict(mutable=True))
        defaults = {each.name: each.value for each in wizard.inputs if each.value}
        secrets = {each.name for each in wizard.secrets}
        query = {name: texts for name, texts in form.fields.lists() if name not in secrets}
        picked = {**defaults, **wizard.start(page_request), **query}
    fields = typed.fields.copy()
    for name, text in picked.items():
        fields.setlist(name, text if isinstance(text, list) else [text])
    return Typed(fields)


def _requester(form: Submission) -> Requester:
    return Requester(actor=form.actor, why=form.text("why"), now=form.now)


def _check(wizard: Wizard, form: Submission, typed: Typed, page_request: PageRequest) -> Checked:
    checked = check(wizard, typed, _requester(form))
    note_conflicts(wizard, typed, page_request, checked)
    return checked


def _is_foreseen(checked: Checked) -> bool:
    """Whether effects are predicted. That takes a second or two, so it is done in a review and not in each check."""
    return checked.result is not None and any(
        step.document.kind is Kind.DEPLOYMENT for step in checked.result.plan.steps
    )


def _foresee(checked: Checked, form: Submission) -> None:
    """Predictions of a review. Without time for them, the review says so and goes without."""
    if not _is_foreseen(checked):
        return
    try:
        with FORECASTS.take(form.request.user.get_username()) as has_time:
            result = documents_preview(documents=checked.parsed, requester=_requester(form))
            checked.forecasts, _ = predicted_effects(result, form.now, has_time)
    except Refusal as refusal:
        checked.not_predicted = str(refusal)


def _apply(wizard: Wizard, form: Submission, typed: Typed, page_request: PageRequest, shell: Fragment) -> HttpResponse:
    checked = _check(wizard, form, typed, page_request)
    if checked.is_ready:
        if not checked.changes_something:  # a repeated submit: it is done
            return redirect(wizard.url(checked.documents))
        require(form.request, role_needed(checked.parsed))
        requester, revision = _requester(form), form.text("revision")
        try:
            if takes_fresh_factor(checked.parsed):
                require_fresh_factor(form.request, form.now)
            applied = documents_apply(documents=checked.parsed, requester=requester, revision=revision)
            if applied.waiting:
                return redirect("approvals")
            return wizard.finish(form.request, checked.documents) or redirect(wizard.url(checked.documents))
        except FactorNeeded:
            return to_confirmation(_url_with(wizard, form.request))
        except Busy as busy:
            checked.add("", str(busy))
            response = _render(wizard, form, typed, checked, page_request, shell, status=503)
            response.headers["Retry-After"] = str(math.ceil(busy.retry_after_s))
            return response
        except (NotPossible, Conflict) as refused:
            again = check(wizard, typed, requester)
            if again.is_ready and not again.changes_something:  # the same submit was faster
                return redirect(wizard.url(again.documents))
            checked.add("", str(refused))
    return _render(wizard, form, typed, checked, page_request, shell)


def _download(wizard: Wizard, checked: Checked) -> HttpResponse:
    response = HttpResponse(checked.yaml, content_type="application/yaml; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="{_file_name(checked.documents)}"'
    return response


def _file_name(documents: Documents) -> str:
    metadata = documents[-1].get("metadata") if documents else None
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:80].strip('-.') or 'document'}.yaml"


def _url_with(wizard: Wizard, request: HttpRequest) -> str:
    """The wizard's URL with the submitted fields, without secrets. `kept` lets the browser restore fields that are too
    long for it."""
    left_out = OWN_FIELDS | {each.name for each in wizard.secrets}
    fields = [(name, text) for name, texts in request.POST.lists() if name not in left_out for text in texts if text]
    query = urlencode(fields) if fields else request.GET.urlencode()
    return f"{request.path}?{query if len(query) <= MAX_URL else 'kept=1'}"


def _signed_out(wizard: Wizard, request: HttpRequest) -> HttpResponse:
    """Forms lead to the login and back with their fields. A check only says so, and the page keeps what was typed."""
    if _is_check(request):
        return render(request, "dashboard/wizards/signed_out.html")
    return redirect_to_login(_url_with(wizard, request))


@dataclass(frozen=True, slots=True)
class ShownInput:
    """An input with its current text, as templates show it."""

    input: Input
    text: str
    texts: list[str]
    errors: list[str]
    options: Sequence[Option]
    rows: list[list[tuple[str, Input, str]]]
    blank: list[tuple[str, Input, str]]

    @property
    def declared(self) -> Any:
        return self.input.declared

    @property
    def lines(self) -> int:
        return min(16, max(2, self.text.count("\n") + 1))

    @property
    def is_filled(self) -> bool:
        filled = [row for row in self.rows if any(text for _, _, text in row)]
        return bool(self.errors or filled or (self.text != self.input.value) or any(self.texts))


def _shown(each: Input, typed: Typed, errors: Sequence[str]) -> ShownInput:
    options = each.options(typed) if each.options else _declared_options(each)
    if each.shown_as is InputKind.SECRET:
        return ShownInput(each, "", [], list(errors), (), [], [])
    text = typed.text(each.name)
    if each.shown_as is InputKind.CHOICE and text and text not in {option.value for option in options}:
        options = [*options, Option(text, text)]
    rows: list[list[tuple[str, Input, str]]] = []
    if each.columns:
        filled = typed.rows(each.name)
        rows = [
            [(f"{each.name}-{index}-{column.name}", column, row.get(column.name, "")) for column in each.columns]
            for index, row in enumerate([*filled, {}])
        ]
    blank = [(f"{each.name}-INDEX-{column.name}", column, "") for column in each.columns]
    texts = typed.texts(each.name) if each.shown_as is InputKind.MANY else []
    return ShownInput(each, text, texts, list(errors), options, rows, blank)


def _declared_options(each: Input) -> list[Option]:
    if each.shown_as is not InputKind.CHOICE:
        return []
    blank = [] if each.required else [Option("", "default")]
    return [*blank, *(Option(str(value), str(label)) for value, label in getattr(each.declared, "choices", {}).items())]


def _render(
    wizard: Wizard,
    form: Submission,
    typed: Typed,
    checked: Checked,
    page_request: PageRequest,
    shell: Fragment,
    *,
    status: int = 409,
) -> HttpResponse:
    request, go = form.request, _pressed(form, "go")
    steps = [
        {
            "step": step,
            "inputs": [_shown(each, typed, checked.errors.get(each.name, ())) for each in step.inputs],
            "facts": step.facts.load(typed) if step.facts else None,
        }
        for step in wizard.steps
    ]
    is_raw = typed.flag(RAW) and not wizard.is_private
    raw_text = typed.text(RAW_TEXT) or (json.dumps(checked.documents, indent=2) if checked.documents else "")
    context = {
        "wizard": wizard,
        "steps": steps,
        "checked": checked,
        "shows_plan": checked.is_ready and checked.changes_something and (go == "review" or not _is_foreseen(checked)),
        "is_post": form.is_post,
        "command": wizard.command(checked.documents) if checked.documents and not is_raw else "",
        "file_name": _file_name(checked.documents),
        "general": [
            text for name, texts in checked.errors.items() if is_raw or not _has_place(wizard, name) for text in texts
        ],
        "error_count": sum(map(len, checked.errors.values())),
        "is_raw": is_raw,
        "raw_text": raw_text,
        "raw_opens": is_raw and not typed.text(RAW_TEXT),
        "why": form.text("why"),
        "base": _base(wizard, typed, page_request),
        "test_url": reverse(wizard.test) if wizard.test else "",
        "retype": form.is_post and any(form.fields.get(each.name) for each in wizard.secrets),
    }
    if _is_check(request):
        return render(request, "dashboard/wizards/check.html", context)
    page = Page(section=wizard.section, title=wizard.title, fragments=())
    context |= shell_context(request, page, shell, page_request)
    failed = form.is_post and go in {"review", "apply", "download", "draft"} and bool(checked.errors or checked.missing)
    return render(request, "dashboard/wizards/wizard.html", context, status=status if failed else 200)


def _base(wizard: Wizard, typed: Typed, page_request: PageRequest) -> str:
    """Digests of the values in the form when it opened; "" for a wizard that changes no object."""
    if not has_stored(wizard, page_request):
        return ""
    return typed.text(BASE) or base_of(wizard, stored_texts(wizard, typed, page_request))


def _has_place(wizard: Wizard, name: str) -> bool:
    return any(each.name == name for each in wizard.inputs)
