"""Wizards: forms that create or change objects by the documents of `controlplane.api.apply`. This module renders a
declared form, checks it as one types with the checks that applying makes, shows the same as YAML and as a command, and
ends with a download, a request for approval or an apply. It never writes: `documents_apply` does, and is audited.

To declare one, next to the pages of its noun:

1. `Input`s. `at` names the field of a document, such as `Deployment.drain_deadline_s`. Kind, help text, bounds and
   choices follow from that field, and its errors are shown at the input.
2. A `Wizard` with `Step`s of inputs and a function from values to documents. Empty inputs are missing in the values.
3. `wizard_view(WIZARD, SHELL)` in `urls.py`, the row in the page matrix, and a button on the list and in its empty
   state (`dashboard/parts/new.html`).

All steps are on one page, so there is one form, one view and one request per check. A field that `apply` lacks is added
there first, so that files and the command line have it as well. Fields travel in the form; a link to the wizard may
carry them in its query. After the end of a session they return in the URL, or from the browser if they are long."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import urlencode

import yaml
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from rest_framework import serializers

from accounts.permissions import FactorNeeded
from controlplane.api.apply.documents import API_VERSION, SPECS, documents_of
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_apply, documents_preview
from controlplane.api.apply.planning import Action, Kind
from controlplane.api.apply.view import PreviewDocumentsSerializer, predicted_effects
from controlplane.dashboard.actions import Submission, to_confirmation
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, View, shell_context
from controlplane.forecast_budget import FORECASTS
from kernel import clock
from kernel.access import Role, require
from kernel.decoding import decode_json
from kernel.refusals import Conflict, InvalidInput, Refusal
from simulator.prediction import Forecast

MAX_INPUT = 100_000
MAX_ROWS = 200
MAX_URL = 4000
"""Characters of fields that a login page carries in its URL; longer ones return from the browser's own store."""
RAW, RAW_TEXT = "raw", "raw-documents"
OWN_FIELDS = frozenset({"csrfmiddlewaretoken", "go", "pick", "revision"})
Values = dict[str, Any]
Documents = list[dict[str, Any]]


class InputKind(StrEnum):
    TEXT = "text"
    NUMBER = "number"
    CHOICE = "choice"
    CHECK = "check"
    MANY = "many"
    JSON = "json"
    ROWS = "rows"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class Option:
    """A value of a choice; `note` is shown next to its label."""

    value: str
    label: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Typed:
    """The submitted texts, by input."""

    fields: QueryDict

    def text(self, name: str) -> str:
        return str(self.fields.get(name, "")).strip()

    def texts(self, name: str) -> list[str]:
        return [text.strip() for text in self.fields.getlist(name)[:MAX_ROWS]]

    def flag(self, name: str) -> bool:
        return self.text(name) == "on"

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows `NAME-INDEX-COLUMN` in order, without empty ones."""
        found: dict[int, dict[str, str]] = {}
        for key in self.fields:
            if (part := re.fullmatch(rf"{re.escape(name)}-(\d{{1,4}})-(\w+)", key)) and (text := self.text(key)):
                found.setdefault(int(part[1]), {})[part[2]] = text
        return [found[index] for index in sorted(found)][:MAX_ROWS]


Options = Callable[[Typed], Sequence[Option]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a form, or a table with `columns`, whose first column is the key of a row.

    `at`: the field of a document that declares it; without one, or for a part of a nested field, state the rest here.
    `value`: the default text. `options`: those of a choice, default: as declared; `follows`: they depend on other
    inputs. `suggests`: a column offers the options of its table."""

    name: str
    at: str = ""
    label: str = ""
    kind: InputKind | None = None
    help: str = ""
    value: str = ""
    placeholder: str = ""
    required: bool = False
    options: Options | None = None
    follows: bool = False
    suggests: bool = False
    columns: tuple["Input", ...] = ()

    @property
    def id(self) -> str:
        return self.name.replace(".", "-")

    @property
    def declared(self) -> "serializers.Field[Any, Any, Any, Any] | None":
        kind, _, path = self.at.partition(".")
        return _declared_fields(Kind(kind)).get(path) if path else None

    @property
    def shown_as(self) -> InputKind:
        if self.kind is not None:
            return self.kind
        if self.columns:
            return InputKind.ROWS
        for kind, types in _KINDS.items():
            if isinstance(self.declared, types):
                return kind
        return InputKind.TEXT

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ").capitalize()

    @property
    def explanation(self) -> str:
        return (self.help or str(getattr(self.declared, "help_text", None) or "")).replace("`", "")


_KINDS: Mapping[InputKind, tuple[type, ...]] = {
    InputKind.CHOICE: (serializers.ChoiceField,),
    InputKind.CHECK: (serializers.BooleanField,),
    InputKind.NUMBER: (serializers.IntegerField, serializers.FloatField),
    InputKind.JSON: (serializers.DictField, serializers.ListField),
}


@cache
def _declared_fields(kind: Kind) -> "Mapping[str, serializers.Field[Any, Any, Any, Any]]":
    return SPECS[kind]().fields


@dataclass(frozen=True, slots=True)
class Facts:
    """A table next to the inputs of a step, such as what fits where. `load` returns its `body`; it is loaded again
    after each check."""

    template: str
    load: Callable[[Typed], object]


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one intent. `folded`: closed until it has an error or a value."""

    title: str
    inputs: tuple[Input, ...]
    about: str = ""
    facts: Facts | None = None
    folded: bool = False

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wizard:
    """A form whose `documents` make or change objects of these `kinds`. `creates`: kinds whose objects must be new.

    `url` leads to the result. `start` returns the first texts, by the URL's query and arguments. `pick` returns texts
    that a button in a step's facts sets. `command`: a shorter command than `switchyard apply`, "" for none."""

    title: str
    section: str
    about: str
    steps: tuple[Step, ...]
    documents: Callable[[Values], Documents]
    kinds: frozenset[Kind]
    creates: frozenset[Kind] = frozenset()
    url: Callable[[Documents], str]
    start: Callable[[PageRequest], Mapping[str, str]] = lambda request: {}
    pick: Callable[[Typed, str], Mapping[str, str]] = lambda typed, value: {}
    command: Callable[[Documents], str] = lambda documents: ""
    role: Role = Role.OPERATOR

    @property
    def inputs(self) -> tuple[Input, ...]:
        return tuple(each for step in self.steps for each in step.inputs)


@dataclass
class Checked:
    """`errors` by input, "" for those without one. `missing`: titles of required inputs that are empty."""

    documents: Documents = field(default_factory=list)
    errors: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    result: ApplyResult | None = None
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    not_predicted: str = ""

    def add(self, name: str, message: str) -> None:
        found = self.errors.setdefault(name, [])
        if message not in found:
            found.append(message)

    @property
    def yaml(self) -> str:
        return documents_as_yaml(self.documents)

    @property
    def is_ready(self) -> bool:
        return self.result is not None and not self.errors

    @property
    def changes_something(self) -> bool:
        return self.result is not None and bool(self.result.plan.steps)


def document(kind: Kind, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind.value, "metadata": {"name": name}, "spec": dict(spec)}


def nested(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named values as a spec: `slo.ttft_ms` becomes a part of `slo`. Missing ones are left out."""
    spec: dict[str, Any] = {}
    for name in names:
        if name in values:
            *above, last = name.split(".")
            place = spec
            for part in above:
                place = place.setdefault(part, {})
            place[last] = values[name]
    return spec


def documents_as_yaml(documents: Documents) -> str:
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, allow_unicode=True, width=100) for one in documents)


def wizard_view(wizard: Wizard, shell: Fragment) -> View:
    """GET shows the form, with fields from the query. POST checks, reviews, downloads or applies it (`go`)."""

    @never_cache
    def view(request: HttpRequest, key: str = "") -> HttpResponse:
        if not request.user.is_authenticated:
            return _signed_out(request)
        require(request, wizard.role)
        if request.method not in {"GET", "HEAD", "POST"}:
            return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
        form = Submission(request, clock.now())
        page_request = PageRequest(key, request.GET, form.now)
        typed = _typed(wizard, form, page_request)
        go = form.text("go") if form.is_post else ""
        if go == "apply":
            return _apply(wizard, form, typed, page_request, shell)
        checked = check(wizard, typed, _requester(form))
        if go == "review" and checked.is_ready:
            _foresee(checked, form)
        if go == "download" and checked.documents and not checked.errors:
            return _download(wizard, checked)
        return _render(wizard, form, typed, checked, page_request, shell)

    return view


def _typed(wizard: Wizard, form: Submission, page_request: PageRequest) -> Typed:
    if form.is_post:
        typed = Typed(form.fields)
        picked = wizard.pick(typed, form.text("pick")) if form.text("pick") else {}
    else:
        typed = Typed(QueryDict(mutable=True))
        defaults = {each.name: each.value for each in wizard.inputs if each.value}
        picked = {**defaults, **wizard.start(page_request), **{k: str(v) for k, v in form.fields.items()}}
    fields = typed.fields.copy()
    for name, text in picked.items():
        fields[name] = text
    return Typed(fields)


def _requester(form: Submission) -> Requester:
    return Requester(actor=form.actor, why=form.text("why"), now=form.now)


def check(wizard: Wizard, typed: Typed, requester: Requester, *, with_fleet: bool = False) -> Checked:
    """The documents of these texts, with all errors that applying them would report. Changes nothing."""
    checked = Checked()
    documents = _documents(wizard, typed, checked)
    if documents is None or checked.missing or checked.errors:
        return checked
    valid = PreviewDocumentsSerializer(data={"documents": documents})
    if not valid.is_valid():
        _note_errors(wizard, checked, valid.errors)
        return checked
    parsed = documents_of(valid.validated_data["documents"])
    try:
        checked.result = documents_preview(documents=parsed, requester=requester, with_fleet=with_fleet)
    except NotPossible as refused:
        for one in refused.objections:
            checked.add(_input_at(wizard, one.document.kind, one.field), one.message)
    except Refusal as refusal:
        checked.add("", str(refusal))
    if checked.result is not None:
        _note_taken(wizard, checked, checked.result)
    return checked


def _documents(wizard: Wizard, typed: Typed, checked: Checked) -> Documents | None:
    if typed.flag(RAW) and typed.text(RAW_TEXT):
        return _raw_documents(wizard, typed, checked)
    values = _values(wizard, typed, checked)
    if not checked.missing and not any(each.required and each.name in checked.errors for each in wizard.inputs):
        try:
            checked.documents = wizard.documents(values)
        except InvalidInput as invalid:
            checked.add(invalid.field, str(invalid))
            return None
    return checked.documents


def _raw_documents(wizard: Wizard, typed: Typed, checked: Checked) -> Documents | None:
    try:
        documents = decode_json(typed.text(RAW_TEXT)[: 2 * MAX_INPUT])
    except ValueError as error:
        checked.add(RAW_TEXT, f"not valid JSON: {error}")
        return None
    if not isinstance(documents, list) or not all(isinstance(one, dict) for one in documents) or not documents:
        checked.add(RAW_TEXT, "it must be a list of documents, each an object")
        return None
    kinds = sorted(kind.value for kind in wizard.kinds)
    if other := next((one.get("kind") for one in documents if one.get("kind") not in kinds), None):
        checked.add(RAW_TEXT, f"kind is {str(other)[:40]!r}; here it must be {' or '.join(kinds)}")
        return None
    checked.documents = documents
    return documents


def _values(wizard: Wizard, typed: Typed, checked: Checked) -> Values:
    """The valid values by input; empty ones are missing."""
    values: Values = {}
    for each in wizard.inputs:
        try:
            value = _value(each, typed)
        except InvalidInput as invalid:
            checked.add(each.name, str(invalid))
            continue
        if value not in (None, "", []):
            values[each.name] = value
        elif each.required:
            checked.missing.append(each.title)
    return values


def _value(each: Input, typed: Typed) -> Any:
    """Raises InvalidInput if the text breaks a rule of its declaration."""
    match each.shown_as:
        case InputKind.CHECK:
            return typed.flag(each.name) or None
        case InputKind.MANY:
            return typed.texts(each.name)
        case InputKind.ROWS:
            return _row_values(each, typed)
    text = typed.text(each.name)
    _check_text(each, text)
    return _parsed(each, text) if text else None


def _check_text(each: Input, text: str) -> None:
    if len(text) > MAX_INPUT:
        raise _wrong(each, f"has {len(text)} characters; the limit is {MAX_INPUT}")


def _parsed(each: Input, text: str) -> Any:
    value: Any = text
    if each.shown_as is InputKind.JSON:
        try:
            value = decode_json(text)
        except ValueError as error:
            raise _wrong(each, f"not valid JSON: {error}") from None
    elif each.shown_as is InputKind.NUMBER and each.declared is None:
        value = _number(each, text)
    if each.declared is None or each.shown_as in {InputKind.ROWS, InputKind.MANY}:
        return value
    try:
        return each.declared.run_validation(value)
    except serializers.ValidationError as error:
        raise _wrong(each, first_error(error.detail)) from None


def _number(each: Input, text: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"[-+]?\d{1,18}", text) else serializers.FloatField().run_validation(text)
    except serializers.ValidationError:
        raise _wrong(each, f"{text[:40]!r} is not a number") from None


def _row_values(each: Input, typed: Typed) -> list[Values]:
    key, rows, seen = each.columns[0], [], set()
    for row in typed.rows(each.name):
        values: Values = {}
        for column in each.columns:
            text = row.get(column.name, "")
            _check_text(column, text)
            if text:
                values[column.name] = _parsed(column, text)
            elif column.required:
                raise _wrong(column, f"is missing for {row.get(key.name, 'a row')[:80]}")
        if values[key.name] in seen:
            raise _wrong(key, f"{str(values[key.name])[:80]} is listed twice")
        seen.add(values[key.name])
        rows.append(values)
    return rows


def _wrong(each: Input, message: str) -> InvalidInput:
    return InvalidInput(field=each.name, rule="valid", message=f"{each.title}: {message}")


def first_error(errors: Any) -> str:
    """The first error of a serializer, with its path inside the field."""
    return next((f"{path}: {text}" if path else text for path, text in _flat(errors)), "is invalid")


def _flat(errors: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every error of a serializer with its dotted path."""
    if isinstance(errors, dict):
        for name, below in errors.items():
            yield from _flat(below, f"{path}.{name}" if path else str(name))
    elif isinstance(errors, list):
        for index, below in enumerate(errors):
            is_text = isinstance(below, str)
            yield from ([(path, str(below))] if is_text else _flat(below, f"{path}.{index}" if path else str(index)))
    else:
        yield path, str(errors)


def _note_errors(wizard: Wizard, checked: Checked, errors: Any) -> None:
    for path, text in _flat(errors):
        _, index, *rest = [*path.split("."), "", ""]
        kind = checked.documents[int(index)].get("kind") if index.isdigit() else ""
        inside = ".".join(part for part in rest if part)
        name = _input_at(wizard, str(kind), inside)
        at_input = next((each for each in wizard.inputs if each.name == name), None)
        deeper = inside.removeprefix("spec.").removeprefix(at_input.at.partition(".")[2] if at_input else "")
        checked.add(name, f"{deeper.strip('.')}: {text}" if deeper.strip(".") else text)


def _input_at(wizard: Wizard, kind: str, path: str) -> str:
    """The input whose field contains this path of a document (`spec.slo.ttft_ms`, `metadata.name`)."""
    inside = path.removeprefix("spec.")
    candidates = [each for each in wizard.inputs if each.at and f"{kind}.{inside}.".startswith(f"{each.at}.")]
    return max(candidates, key=lambda each: len(each.at)).name if candidates else ""


def _note_taken(wizard: Wizard, checked: Checked, result: ApplyResult) -> None:
    """An object that should be new, but exists with other fields, must not be changed by mistake."""
    created = {step.document.title for step in result.plan.steps if step.action is Action.CREATE}
    for step in result.plan.steps:
        one = step.document
        if one.kind in wizard.creates and one.title not in created and step.action is not Action.VALIDATE:
            name = _input_at(wizard, one.kind, "metadata.name")
            checked.add(name, f"{one.name} exists already and differs; choose another name, or change it on its page")


def _foresee(checked: Checked, form: Submission) -> None:
    """Predictions of a review. Without time for them, the review says so and goes without."""
    if checked.result is None or all(step.document.kind is not Kind.DEPLOYMENT for step in checked.result.plan.steps):
        return
    parsed = tuple(dict.fromkeys(step.document for step in checked.result.plan.steps))
    try:
        with FORECASTS.take(form.request.user.get_username()) as has_time:
            result = documents_preview(documents=parsed, requester=_requester(form))
            checked.forecasts, _ = predicted_effects(result, form.now, has_time)
    except Refusal as refusal:
        checked.not_predicted = str(refusal)


def _apply(wizard: Wizard, form: Submission, typed: Typed, page_request: PageRequest, shell: Fragment) -> HttpResponse:
    checked = check(wizard, typed, _requester(form))
    if checked.is_ready:
        if not checked.changes_something:  # a repeated submit: it is done
            return redirect(wizard.url(checked.documents))
        valid = PreviewDocumentsSerializer(data={"documents": checked.documents})
        valid.is_valid(raise_exception=True)
        documents = documents_of(valid.validated_data["documents"])
        try:
            applied = documents_apply(documents=documents, requester=_requester(form), revision=form.text("revision"))
            return redirect("approvals" if applied.waiting else wizard.url(checked.documents))
        except FactorNeeded:
            return to_confirmation(_url_with(form.request))
        except (NotPossible, Conflict) as refused:
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


def _url_with(request: HttpRequest) -> str:
    """The wizard's URL with the submitted fields. `kept` lets the browser restore fields that are too long for it."""
    fields = [(name, text) for name, texts in request.POST.lists() if name not in OWN_FIELDS for text in texts if text]
    query = urlencode(fields) if fields else request.GET.urlencode()
    return f"{request.path}?{query if len(query) <= MAX_URL else 'kept=1'}"


def _signed_out(request: HttpRequest) -> HttpResponse:
    """Forms lead to the login and back with their fields. A check only says so, and the page keeps what was typed."""
    if "HX-Request" in request.headers:
        return render(request, "dashboard/wizards/signed_out.html")
    return redirect_to_login(_url_with(request))


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
    wizard: Wizard, form: Submission, typed: Typed, checked: Checked, page_request: PageRequest, shell: Fragment
) -> HttpResponse:
    request, is_check = form.request, "HX-Request" in form.request.headers
    go = form.text("go") if form.is_post else ""
    steps = [
        {
            "step": step,
            "inputs": [_shown(each, typed, checked.errors.get(each.name, ())) for each in step.inputs],
            "facts": step.facts.load(typed) if step.facts else None,
        }
        for step in wizard.steps
    ]
    is_raw = typed.flag(RAW)
    raw_text = typed.text(RAW_TEXT) or (json.dumps(checked.documents, indent=2) if checked.documents else "")
    context = {
        "wizard": wizard,
        "steps": steps,
        "checked": checked,
        "is_review": go in {"review", "apply"},
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
    }
    if is_check:
        return render(request, "dashboard/wizards/check.html", context)
    page = Page(section=wizard.section, title=wizard.title, fragments=())
    context |= shell_context(request, page, shell, page_request)
    failed = form.is_post and go in {"review", "apply", "download"} and bool(checked.errors or checked.missing)
    return render(request, "dashboard/wizards/wizard.html", context, status=409 if failed else 200)


def _has_place(wizard: Wizard, name: str) -> bool:
    return any(each.name == name for each in wizard.inputs)
