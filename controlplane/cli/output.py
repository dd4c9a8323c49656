"""Writes results: tables for people, JSON or YAML for programs. Tables fit the terminal; piped ones are as wide as
needed. It never colours piped output."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from controlplane.cli.resources import Column, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    """Only the names, one per line."""


TONE_STYLE = {"ok": "green", "moving": "blue", "warn": "yellow", "bad": "bold red", "idle": "dim", "bake": "magenta"}


class Output:
    """Where a command writes. `colour` false: never; true: in a terminal."""

    def __init__(
        self,
        form: Format,
        *,
        colour: bool = True,
        out: TextIO | None = None,
        err: TextIO | None = None,
        now: datetime | None = None,
    ) -> None:
        self.form = form
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.colour = colour and self.out.isatty()
        self.now = now or datetime.now(UTC)

    @property
    def is_for_programs(self) -> bool:
        return self.form in {Format.JSON, Format.YAML}

    def line(self, text: str = "") -> None:
        """A line for people, omitted in JSON and YAML."""
        if not self.is_for_programs:
            self.plain(text)

    def plain(self, text: str) -> None:
        self.out.write(f"{text}\n")
        self.out.flush()

    def note(self, text: str) -> None:
        self.err.write(f"{text}\n")
        self.err.flush()

    def document(self, document: Any) -> None:
        self.plain(as_yaml(document).rstrip() if self.form is Format.YAML else as_json(document))

    def toned(self, text: str, tone: str) -> None:
        """A line in the colour of its tone, if colours are enabled."""
        if self.is_for_programs:
            return
        if not self.colour:
            self.plain(text)
            return
        self.console().print(text, style=TONE_STYLE.get(tone, ""), markup=False, highlight=False, soft_wrap=True)

    def rows(self, columns: Sequence[Column], rows: Sequence[Row], *, empty: str) -> None:
        """Writes a table, or `empty` to standard error."""
        if not rows:
            self.note(empty)
        elif self.colour:
            self.console().print(rich_table(columns, rows, self.now))
        else:
            for text in plain_table(columns, rows, self.now):
                self.plain(text)

    def console(self) -> "Console":
        from rich.console import Console

        return Console(file=self.out, no_color=not self.colour, highlight=False)


def as_json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_yaml(document: Any) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def plain_table(columns: Sequence[Column], rows: Iterable[Row], now: datetime) -> list[str]:
    """Columns as wide as the widest value, numbers right-aligned, nothing truncated."""
    cells = [[column.title for column in columns], *([column.show(row, now) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return [
        "  ".join(
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    ]


def rich_table(columns: Sequence[Column], rows: Iterable[Row], now: datetime) -> "Table":
    """A table for a terminal: colours of tones, long values wrapped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        style = TONE_STYLE.get(str(row.get("tone")), "")
        table.add_row(*(Text(column.show(row, now), style=style if column.toned else "") for column in columns))
    return table


def described(row: Mapping[str, Any], indent: int = 0) -> list[str]:
    """One object in full: a line for each field, lists of objects as small tables."""
    from controlplane.cli.resources import at, text_of

    margin, lines = " " * indent, []
    width = max((len(name) for name in row), default=0) + 1
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{margin}{name}:", *described(value, indent + 2)]
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            titles = list(dict.fromkeys(key for one in value for key in one))
            table = plain_table([Column(title.upper(), at(title)) for title in titles], value, datetime.now(UTC))
            lines += [f"{margin}{name}:", *(f"{margin}  {line}" for line in table)]
        else:
            lines.append(f"{margin}{name + ':':<{width}} {text_of(value)}")
    return lines
