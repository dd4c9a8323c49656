"""Wizards: forms that create or change objects by the documents of `controlplane.api.apply`. This module declares
forms; `controlplane.dashboard.wizard_checks` checks what was typed, and `controlplane.dashboard.wizard_pages` shows and
applies it.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import yaml
from django.http import HttpRequest, HttpResponse, QueryDict
from rest_framework import serializers

from controlplane.api.apply.access_kinds import PRIVATE
from controlplane.api.apply.documents import API_VERSION, SPECS
from controlplane.api.apply.planning import Kind
from controlplane.dashboard.fragments import PageRequest
from kernel.access import Role

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
