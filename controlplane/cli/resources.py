"""Resources of the API as the command line shows them: names, path, key and columns. Pure: controlplane.cli.schema
reads the list from the server's OpenAPI document."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]
Cell = str
Show = Callable[[Row, datetime], Cell]


@dataclass(frozen=True, slots=True)
class Column:
    """`right`: for numbers. `toned`: has the colour of the row's tone."""

    title: str
    show: Show
    right: bool = False
    toned: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a create request. `kind`: its JSON type; `many`: type of a list's items."""

    name: str
    kind: str
    help: str = ""
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True, slots=True)
class Resource:
    """`path`: below /api/v1/; `key`: the field that names a row; `names`: plural, singular, then short ones."""

    path: str
    key: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    ends: bool = False
    """Whether ended rows are left out without `include=all`."""
    fields: tuple[Field, ...] = ()
    """None, if the API has no create request."""
    summary: str = ""
    """Description of the create request."""
    secrets: tuple[str, ...] = ()
    """Fields that only the response to a create request has."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def noun(self) -> str:
        return self.names[1]


def column_of(stated: str, *, is_number: bool = False) -> Column:
    """A column in the notation of view sets: `TITLE`, `TITLE=path` or `TITLE=path:how`. `TITLE` alone is the field with
    the title's name in lower case. `how` is one of `age`, `count` (of a list), `counts` (state -> number), `number`
    (align right) and `or=TEXT` (for an empty value), or a text with `{fields}` of each item of a list; without a path,
    the fields are those of the row."""
    title, sign, source = stated.partition("=")
    path, _, how = (source if sign else title.lower().replace(" ", "_")).partition(":")
    right = is_number or how in {"age", "count", "number"}
    return Column(title, _SHOWN.get(how, _shown_by)(path, how), right=right, toned=path == "state" or stated == "KIND")


def at(path: str) -> Show:
    """The value at a dotted path, for every item of a list; empty if missing."""

    def show(row: Row, now: datetime) -> Cell:
        return text_of(_value_at(row, path.split(".")))

    return show


def _value_at(value: Any, names: Sequence[str]) -> Any:
    if not names:
        return value
    if isinstance(value, list | tuple):
        return [_value_at(part, names) for part in value]
    return _value_at(value.get(names[0]), names[1:]) if isinstance(value, Mapping) else None


def age(path: str) -> Show:
    """Time since the moment in a field."""

    def show(row: Row, now: datetime) -> Cell:
        return age_text(row.get(path), now)

    return show


def _count(path: str) -> Show:
    return lambda row, now: str(len(row.get(path, ())))


def _counts(path: str) -> Show:
    def show(row: Row, now: datetime) -> Cell:
        return ", ".join(f"{count} {state}" for state, count in row.get(path, {}).items() if count) or "-"

    return show


def _shown_by(path: str, how: str) -> Show:
    if how.startswith("or="):
        return lambda row, now: str(row.get(path) or how.removeprefix("or="))
    if not path:
        return lambda row, now: _filled(how, row)
    return lambda row, now: ", ".join(_filled(how, part) for part in row.get(path, ()))


def _filled(text: str, row: Row) -> str:
    return re.sub(r"{(\w+)}", lambda found: text_of(row.get(found[1])), text)


_SHOWN: Mapping[str, Callable[[str, str], Show]] = {
    "": lambda path, how: at(path),
    "number": lambda path, how: at(path),
    "age": lambda path, how: age(path),
    "count": lambda path, how: _count(path),
    "counts": lambda path, how: _counts(path),
}


def text_of(value: Any) -> Cell:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_nested_text(part)}" for key, part in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_nested_text(part) for part in value) or "-"
    return str(value)


def _nested_text(value: Any) -> Cell:
    """A nested value: objects are in braces."""
    text = text_of(value)
    return f"{{{text}}}" if isinstance(value, Mapping | list | tuple) and value else text


def age_text(moment: Any, now: datetime) -> Cell:
    """`42s`, `17m`, `5h`, `3d` since an RFC 3339 moment."""
    if not isinstance(moment, str):
        return "-"
    try:
        seconds = int((now - datetime.fromisoformat(moment)).total_seconds())
    except (ValueError, TypeError):
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"


def number(title: str, path: str) -> Column:
    return Column(title, at(path), right=True)


COLUMNS_MOST = 7
"""Number of columns of a list without chosen ones."""


def columns_of(resource: Resource, rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    """The chosen columns, else the first scalar fields."""
    if resource.columns or not rows:
        return resource.columns
    plain = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    return tuple(Column(name.upper().replace("_", " "), at(name)) for name in plain[:COLUMNS_MOST])
