"""The lists of the API as the command line shows them: names, path, key and columns. Pure; which lists there are comes
from the server's OpenAPI document (controlplane.cli.schema)."""

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
    """`right`: numbers. `toned`: it takes the colour of the row's tone."""

    title: str
    show: Show
    right: bool = False
    toned: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the body that creates a row. `kind`: its JSON type; `many`: of a list, the type of its items."""

    name: str
    kind: str
    help: str = ""
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True, slots=True)
class Resource:
    """`path`: below /api/v1/; `key`: the field that names a row; `names`: of many, of one, then short ones."""

    path: str
    key: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    ends: bool = False
    """Whether ended ones are left out unless `include=all` asks for them."""
    fields: tuple[Field, ...] = ()
    """None, if the API creates none."""
    summary: str = ""
    """What creating one does."""
    secrets: tuple[str, ...] = ()
    """Fields that are shown once, when one is created."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def noun(self) -> str:
        return self.names[1]


def column_of(stated: str, *, is_number: bool = False) -> Column:
    """A column as view sets state it: `TITLE`, `TITLE=path` or `TITLE=path:how`. `TITLE` alone shows the field whose
    name is the title in lower case. `how` is one of `age`, `count` (of a list), `counts` (state -> number), `number`
    (align right) and `or=TEXT` (where the value is empty), or a text with `{fields}` of each part of a list. Such a
    text without a path takes the fields of the row.
    """
    title, sign, source = stated.partition("=")
    path, _, how = (source if sign else title.lower().replace(" ", "_")).partition(":")
    right = is_number or how in {"age", "count", "number"}
    return Column(title, _SHOWN.get(how, _shown_by)(path, how), right=right, toned=path == "state" or stated == "KIND")


def at(path: str) -> Show:
    """Shows the value at a dotted path, of every part of a list; empty where there is none."""

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
    """Shows how long ago the moment at a field was."""

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
    """Of a text with fields, or of one that stands where the value is empty."""
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
    """A value in a cell: one line, without quotes."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_inner(part)}" for key, part in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_inner(part) for part in value) or "-"
    return str(value)


def _inner(value: Any) -> Cell:
    """A value within another: what has parts is in braces."""
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
"""Of a list without chosen columns."""


def columns_of(resource: Resource, rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    """Those that were chosen, else the first plain fields."""
    if resource.columns or not rows:
        return resource.columns
    plain = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    return tuple(Column(name.upper().replace("_", " "), at(name)) for name in plain[:COLUMNS_MOST])
