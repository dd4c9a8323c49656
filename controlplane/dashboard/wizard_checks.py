"""Reads what was typed into a wizard, and checks it with the checks that applying makes. It changes nothing."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rest_framework import serializers

from controlplane.api.apply.documents import documents_of
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_preview
from controlplane.api.apply.planning import Action, Document, plan_documents
from controlplane.api.apply.present import present_of
from controlplane.api.apply.view import PreviewDocumentsSerializer
from controlplane.dashboard.wizards import (
    RAW,
    RAW_TEXT,
    Documents,
    Input,
    InputKind,
    Typed,
    Values,
    Wizard,
    documents_as_yaml,
)
from kernel.decoding import decode_json
from kernel.refusals import InvalidInput, Refusal
from simulator.prediction import Forecast

MAX_INPUT = 100_000
MAX_ROWS = 200
MAX_SECRET = 500


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
