"""Conflicts of a wizard that changes an object: a form carries digests of the stored values that it was opened with. A
field whose stored value has changed since is refused with both values, until the user keeps one of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from django.http import Http404, QueryDict

from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.wizard_checks import Checked
from controlplane.dashboard.wizards import RAW, Input, InputKind, Typed, Wizard
from kernel.decoding import decode_json

BASE = "base"
DIGITS = 8
SHOWN = 300


def has_stored(wizard: Wizard, request: PageRequest) -> bool:
    """Whether the form may change an object."""
    return bool(request.key) or wizard.stored is not None


def stored_texts(wizard: Wizard, typed: Typed, request: PageRequest) -> Typed:
    """The texts of a form for the same object that is opened now."""
    fields = QueryDict(mutable=True)
    defaults = {each.name: each.value for each in wizard.inputs}
    stored = wizard.stored(typed) if wizard.stored else wizard.start(request)
    for name, text in {**defaults, **stored}.items():
        fields.setlist(name, text if isinstance(text, list) else [text])
    return Typed(fields)


def base_of(wizard: Wizard, stored: Typed) -> str:
    """The digests as JSON, for the form's field `base`."""
    return json.dumps({each.name: _digest(each, stored) for each in _compared(wizard)}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A field with another stored value than when the form was opened. `stored` and `typed` as text. `was_empty`: the
    form was opened without a value, perhaps for an object that existed."""

    input: Input
    stored: str
    typed: str
    was_empty: bool

    @property
    def message(self) -> str:
        how = "is set already" if self.was_empty else "was changed while this form was open"
        now, mine = self.stored or "empty", self.typed or "empty"
        return f"{self.input.title} {how}: it is {now!r} now, and you have {mine!r}"


def overwritten(wizard: Wizard, typed: Typed, stored: Typed) -> list[Overwritten]:
    """Fields that this form would overwrite although they have changed since it was opened."""
    base, nothing = _read_base(typed), Typed(QueryDict())
    return [
        Overwritten(each, _shown(each, stored), _shown(each, typed), base[each.name] == _digest(each, nothing))
        for each in _compared(wizard)
        if each.name in base
        and base[each.name] != _digest(each, stored)
        and (typed.flag(RAW) or _value(each, typed) != _value(each, stored))
    ]


def note_conflicts(wizard: Wizard, typed: Typed, request: PageRequest, checked: Checked) -> None:
    """Adds an error for each overwritten field."""
    if not has_stored(wizard, request) or not typed.text(BASE):
        return
    try:
        stored = stored_texts(wizard, typed, request)
    except Http404 as gone:
        checked.add("", str(gone))
        return
    for one in overwritten(wizard, typed, stored):
        checked.add(one.input.name, one.message)
        checked.has_conflicts = True


def settled(wizard: Wizard, typed: Typed, request: PageRequest, *, takes_stored: bool) -> Typed:
    """The form after its conflicts were shown: with the stored values of these fields, or with what was typed."""
    stored = stored_texts(wizard, typed, request)
    fields = typed.fields.copy()
    for one in overwritten(wizard, typed, stored) if takes_stored else ():
        name = one.input.name
        for key in [key for key in fields if key == name or key.startswith(f"{name}-")]:
            del fields[key]
        for key, texts in stored.fields.lists():
            if key == name or key.startswith(f"{name}-"):
                fields.setlist(key, texts)
    fields[BASE] = base_of(wizard, stored)
    return Typed(fields)


def _compared(wizard: Wizard) -> Iterator[Input]:
    return (each for each in wizard.inputs if each.shown_as not in {InputKind.HIDDEN, InputKind.SECRET})


def _value(each: Input, typed: Typed) -> Any:
    if each.shown_as is InputKind.ROWS:
        return typed.rows(each.name)
    if each.shown_as is InputKind.MANY:
        return typed.texts(each.name)
    return typed.flag(each.name) if each.shown_as is InputKind.CHECK else typed.text(each.name).replace("\r\n", "\n")


def _shown(each: Input, typed: Typed) -> str:
    value = _value(each, typed)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        value = "; ".join(", ".join(one.values()) if isinstance(one, dict) else one for one in value)
    return str(value)[:SHOWN]


def _digest(each: Input, typed: Typed) -> str:
    return sha256(json.dumps(_value(each, typed), sort_keys=True).encode()).hexdigest()[:DIGITS]


def _read_base(typed: Typed) -> dict[str, Any]:
    try:
        base = decode_json(typed.text(BASE) or "{}")
    except ValueError:
        return {}
    return base if isinstance(base, dict) else {}
