"""Wizards: forms that create or change objects by the documents of `controlplane.api.apply`. This module declares
forms, reads what was typed, and checks it with the checks that applying makes; it changes nothing.
`controlplane.dashboard.wizard_pages` shows and applies them.

To declare one, next to the pages of its noun:

1. `Input`s. `at` names the field of a document, such as `Deployment.drain_deadline_s`. Kind, help text, bounds and
   choices follow from that field, and its errors are shown at the input.
2. A `Wizard` with `Step`s of inputs and a function from values to documents. Empty inputs are missing in the values.
3. `wizard_view(WIZARD, SHELL)` in `urls.py`, the row in the page matrix, and a button on the list and in its empty
   state (`dashboard/parts/new.html`).

All steps are on one page, so there is one form, one view and one request per check. A field that `apply` lacks is added
there first, so that files and the command line have it as well. Fields travel in the form; a link to the wizard may
carry them in its query. After the end of a session they return in the URL, or from the browser if they are long."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Any

import yaml
from django.http import HttpRequest, HttpResponse, QueryDict
from rest_framework import serializers

from controlplane.api.apply.access_kinds import PRIVATE
from controlplane.api.apply.documents import API_VERSION, SPECS, documents_of
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_preview
from controlplane.api.apply.planning import Action, Document, Kind, plan_documents
from controlplane.api.apply.present import present_of
from controlplane.api.apply.view import PreviewDocumentsSerializer
from controlplane.dashboard.fragments import PageRequest
from kernel.access import Role
from kernel.decoding import decode_json
from kernel.refusals import InvalidInput, Refusal
from simulator.prediction import Forecast

MAX_INPUT = 100_000
MAX_ROWS = 200
MAX_SECRET = 500
RAW, RAW_TEXT = "raw", "raw-documents"
Values = dict[str, Any]
Documents = list[dict[str, Any]]


class InputKind(StrEnum):
    TEXT = "text"
    LONG = "long"
    NUMBER = "number"
    CHOICE = "choice"
    CHECK = "check"
    MANY = "many"
    JSON = "json"
    ROWS = "rows"
    HIDDEN = "hidden"
    SECRET = "secret"  # noqa: S105 - the name of a kind of input


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
        return [text.strip() for text in self.fields.getlist(name)]

    def flag(self, name: str) -> bool:
        return self.text(name) == "on"

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows `NAME-INDEX-COLUMN` in order, without empty ones. Texts keep their spaces."""
        found: dict[int, dict[str, str]] = {}
        for key in self.fields:
            part = re.fullmatch(rf"{re.escape(name)}-(\d{{1,4}})-(\w+)", key)
            if part and (text := str(self.fields.get(key, "")).replace("\r\n", "\n")).strip():
                found.setdefault(int(part[1]), {})[part[2]] = text
        return [found[index] for index in sorted(found)]


Options = Callable[[Typed], Sequence[Option]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a form, or a table with `columns`. A required first column is the unique key of a row. LONG keeps
    its spaces and lines. SECRET is never shown again and in no document: `at` names the field that the apply sets.

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
        """None for a part of a nested field, whose name has a dot."""
        kind, _, path = self.at.partition(".")
        return _declared_fields(Kind(kind)).get(path) if path and "." not in self.name else None

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
    that a button in a step's facts sets. `command`: a shorter command than `switchyard apply`, "" for none. `test`: the
    name of the URL to which the form is sent to try it out, "" for none. `stored`: the stored texts of the object that
    the form names, for a wizard whose URL names none but that may change one. `finish` shows a page after the apply,
    such as a secret."""

    title: str
    section: str
    about: str
    steps: tuple[Step, ...]
    documents: Callable[[Values], Documents]
    kinds: frozenset[Kind]
    creates: frozenset[Kind] = frozenset()
    url: Callable[[Documents], str]
    start: Callable[[PageRequest], Mapping[str, str | list[str]]] = lambda request: {}
    pick: Callable[[Typed, str], Mapping[str, str]] = lambda typed, value: {}
    command: Callable[[Documents], str] = lambda documents: ""
    role: Role = Role.OPERATOR
    test: str = ""
    stored: Callable[[Typed], Mapping[str, str]] | None = None
    finish: Callable[[HttpRequest, Documents], HttpResponse | None] = lambda request, documents: None

    @property
    def inputs(self) -> tuple[Input, ...]:
        return tuple(each for step in self.steps for each in step.inputs)

    @property
    def secrets(self) -> tuple[Input, ...]:
        return tuple(each for each in self.inputs if each.shown_as is InputKind.SECRET)

    @property
    def is_private(self) -> bool:
        """Whether its documents are only for admins: no draft holds them, and audit records hide parts of them, which
        they could not in a text of several documents."""
        return bool(self.kinds & PRIVATE)


@dataclass
class Checked:
    """`errors` by input, "" for those without one. `missing`: titles of required inputs that are empty.
    `has_conflicts`: some errors are stored values that have changed while the form was open."""

    documents: Documents = field(default_factory=list)
    parsed: tuple[Document, ...] = ()
    errors: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    result: ApplyResult | None = None
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    not_predicted: str = ""
    has_conflicts: bool = False

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


class _Dumper(yaml.SafeDumper):
    """Repeats equal values instead of linking them: `switchyard apply` reads no links."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents_as_yaml(documents: Documents) -> str:
    dumped = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100) for one in documents)
    return "---\n".join(dumped)


def check(wizard: Wizard, typed: Typed, requester: Requester) -> Checked:
    """The documents of these texts, with all errors that applying them would report. Changes nothing."""
    checked = Checked()
    documents = _documents(wizard, typed, checked)
    if documents is None or checked.missing or checked.errors:
        return checked
    valid = PreviewDocumentsSerializer(data={"documents": documents})
    if not valid.is_valid():
        _note_errors(wizard, checked, valid.errors)
        return checked
    checked.parsed = _with_secrets(wizard, typed, documents_of(valid.validated_data["documents"]))
    _note_taken(wizard, checked)
    try:
        checked.result = documents_preview(documents=checked.parsed, requester=requester, with_fleet=False)
    except NotPossible as refused:
        for one in refused.objections:
            checked.add(_input_at(wizard, one.document.kind, one.field), one.message)
    except Refusal as refusal:
        checked.add("", str(refusal))
    return checked


def _with_secrets(wizard: Wizard, typed: Typed, documents: tuple[Document, ...]) -> tuple[Document, ...]:
    typed_texts = {each.at: str(typed.fields.get(each.name, ""))[:MAX_SECRET] for each in wizard.secrets}
    return tuple(
        replace(
            one,
            secrets={at.partition(".")[2]: text for at, text in typed_texts.items() if text and _is_in(at, one)},
        )
        for one in documents
    )


def _is_in(at: str, one: Document) -> bool:
    return at.partition(".")[0] == one.kind.value


def _documents(wizard: Wizard, typed: Typed, checked: Checked) -> Documents | None:
    if typed.flag(RAW) and typed.text(RAW_TEXT) and not wizard.is_private:
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
        if each.shown_as is InputKind.SECRET:
            continue
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
    if len(text) > MAX_INPUT:
        raise _wrong(each, f"has {len(text)} characters; the limit is {MAX_INPUT}")
    return _parsed(each, text) if text else None


def _parsed(each: Input, text: str) -> Any:
    value: Any = text
    if each.shown_as is InputKind.JSON:
        try:
            value = decode_json(text)
        except ValueError as error:
            raise _wrong(each, f"not valid JSON: {error}") from None
        if each.declared is None and not isinstance(value, dict):
            raise _wrong(each, "it must be an object")
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
    key, found = each.columns[0], typed.rows(each.name)
    if len(found) > MAX_ROWS:
        raise _wrong(each, f"has {len(found)} rows; the limit is {MAX_ROWS}")
    rows = [dict(_row(each, row)) for row in found]
    keys = [str(row[key.name]) for row in rows] if key.required else []
    if doubled := next((text for text in keys if keys.count(text) > 1), ""):
        raise _wrong(each, f"{doubled[:80]} is listed twice")
    return rows


def _row(table: Input, row: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for column in table.columns:
        text = row.get(column.name, "")
        text = text if column.shown_as is InputKind.LONG else text.strip()
        if len(text) > MAX_INPUT:
            raise _wrong(table, f"{column.title} has {len(text)} characters; the limit is {MAX_INPUT}")
        if column.shown_as is InputKind.CHECK and text:
            yield column.name, text == "on"
        elif text:
            yield column.name, _parsed(column, text)
        elif column.required:
            raise _wrong(table, f"{column.title} is missing in a row")


def _wrong(each: Input, message: str) -> InvalidInput:
    return InvalidInput(field=each.name, rule="valid", message=f"{each.title}: {message}")


def first_error(errors: Any) -> str:
    """The first error of a serializer, with its path inside the field."""
    return next((f"{path}: {text}" if path else text for path, text in errors_by_path(errors)), "is invalid")


def errors_by_path(errors: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every error of a serializer with its dotted path."""
    if isinstance(errors, dict):
        for name, below in errors.items():
            yield from errors_by_path(below, f"{path}.{name}" if path else str(name))
    elif isinstance(errors, list):
        for index, below in enumerate(errors):
            inside = f"{path}.{index}" if path else str(index)
            yield from [(path, str(below))] if isinstance(below, str) else errors_by_path(below, inside)
    else:
        yield path, str(errors)


def _note_errors(wizard: Wizard, checked: Checked, errors: Any) -> None:
    for path, text in errors_by_path(errors):
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


def _note_taken(wizard: Wizard, checked: Checked) -> None:
    """An object that should be new, but exists with other fields, must not be changed by mistake."""
    steps = plan_documents(checked.parsed, present_of(checked.parsed)).steps
    created = {step.document.title for step in steps if step.action is Action.CREATE}
    for step in steps:
        one = step.document
        if one.kind in wizard.creates and one.title not in created and step.action is not Action.VALIDATE:
            name = _input_at(wizard, one.kind, "metadata.name")
            checked.add(name, f"{one.title} exists already and differs; choose another name, or change it on its page")
