"""Lists: one declaration for each, with its columns and query. This module searches, filters and sorts by the columns,
pages, keeps all of it in the URL, and exports the same rows as CSV. Reads only."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, Generic, TypeVar

from django.db.models import F, OrderBy, Q, QuerySet
from django.http import StreamingHttpResponse

from controlplane.dashboard.choices import choose
from controlplane.dashboard.fragments import Choice, PageRequest

Row = TypeVar("Row")
ROWS_SHOWN = 50
MAX_EXPORTED = 50_000
"""Rows of one export. At 5,000 nodes every list but events and audit records is complete."""
CHUNK = 500
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet would calculate a cell that begins so: https://owasp.org/www-community/attacks/CSV_Injection"""


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column. `value`: of a row, as exported. `order`: the columns of the query to sort by, () if it cannot be
    sorted; `is_newest_first`: the first click sorts it in descending order. `css`: its classes. `choices`: values that
    the list can be narrowed to; a query compares them with the first column of `order`."""

    name: str
    label: str
    value: Callable[[Row], object]
    order: tuple[str, ...] = ()
    css: str = ""
    title: str = ""
    is_newest_first: bool = False
    choices: tuple[str, ...] = ()


def plain(
    path: str, label: str, css: str = "", *, name: str = "", title: str = "", choices: Iterable[str] = ()
) -> Column[Any]:
    """A column of the query as it is, such as `user__username`. Numbers and times are sorted in descending order first;
    `name`: by default the last part of the path."""
    parts = path.split("__")

    def value(row: Any) -> object:
        return reduce(lambda found, part: getattr(found, part, None), parts, row)

    name = name or parts[-1].replace("_", "-")
    return Column(name, label, value, (path,), css, title, "number" in css.split(), tuple(choices))


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's heading. `sort`: the value of `sort` in the URL that a click sets, "" if it cannot be sorted;
    `direction`: ascending or descending, if the list is sorted by it."""

    label: str
    css: str
    title: str
    sort: str
    direction: str


@dataclass(frozen=True, slots=True)
class ListPage(Generic[Row]):
    """One page of a list. `page`: from 1, or 0 if the list is part of another page; `filtered`: parameters of the URL
    narrow it. `exports`: it can be downloaded. `prefix`: of its parameters; `found`: the text that it is searched for;
    `label`: of the box for that text, "" without one; `choices`: its other filters; `above`: what its template shows
    besides rows."""

    rows: tuple[Row, ...]
    more: bool
    filtered: bool
    page: int
    headings: tuple[Heading, ...]
    exports: bool = True
    prefix: str = ""
    found: str = ""
    label: str = ""
    choices: tuple[Choice, ...] = ()
    above: object = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of the URL that its filter sets."""
        return (f"{self.prefix}q", f"{self.prefix}page", *(choice.name for choice in self.choices))


def _as_they_are(objects: Sequence[Any], now: datetime) -> Sequence[Any]:
    return objects


@dataclass(frozen=True, slots=True, kw_only=True)
class List(Generic[Row]):
    """A list. `query`: the objects that the page's filter leaves; `rows`: their rows, in a constant number of queries;
    by default the objects. `order`: by which they are sorted without a choice; its last column makes the order unique.
    `find`: columns of the query in which `q` is searched for; `filters`: other parameters that `query` reads.
    `by_value`: searches, filters and sorts all rows by the values that they show, for short lists whose rows are
    computed; then `query` may return a sequence that is in order, and `find` names columns of the list. `prefix`: of
    its parameters in the URL, such as `builds-`, for a list that shares its page. `above`: loads what its template
    shows besides rows."""

    name: str
    columns: tuple[Column[Row], ...]
    query: Callable[[PageRequest], Any]
    rows: Callable[[Sequence[Any], datetime], Sequence[Row]] = _as_they_are
    order: tuple[str, ...] = ()
    find: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    by_value: bool = False
    prefix: str = ""
    above: Callable[[PageRequest], object] | None = None

    def page(self, request: PageRequest) -> ListPage[Row]:
        number = request.page_of(self.prefix)
        shown = slice((number - 1) * ROWS_SHOWN, number * ROWS_SHOWN + 1)
        found = self._by_value(request)[shown] if self.by_value else self._of_query(request, shown)
        return ListPage(
            rows=tuple(found[:ROWS_SHOWN]),
            more=len(found) > ROWS_SHOWN,
            filtered=self._is_filtered(request),
            page=number,
            headings=self._headings(request),
            prefix=self.prefix,
            found=request.text(f"{self.prefix}q"),
            label=f"Find {self.name.replace('-', ' ')}" if self.find else "",
            choices=tuple(self._choice(column, request) for column in self.columns if column.choices),
            above=self.above(request) if self.above else None,
        )

    def part(self, objects: Sequence[Any], now: datetime, limit: int) -> ListPage[Row]:
        """The first of these objects, as a part of another page: neither sorted nor exported."""
        return self.part_of_rows(self.rows(objects[:limit], now), len(objects) > limit)

    def part_of_rows(self, rows: Sequence[Row], more: bool = False) -> ListPage[Row]:
        headings = tuple(Heading(each.label, each.css, each.title, "", "") for each in self.columns)
        return ListPage(tuple(rows), more, False, 0, headings, exports=False)

    def export(self, request: PageRequest) -> StreamingHttpResponse:
        name = f"{self.name}-{request.now.astimezone(UTC):%Y%m%dT%H%M%SZ}.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        rows = iter(self._by_value(request)) if self.by_value else self._all(self._sorted(request), request.now)
        return StreamingHttpResponse(self._lines(rows), content_type="text/csv; charset=utf-8", headers=headers)

    def _lines(self, rows: Iterator[Row]) -> Iterator[str]:
        writer = csv.writer(_Echo())
        yield writer.writerow([column.label for column in self.columns])
        for row in rows:
            yield writer.writerow([cell_text(column.value(row)) for column in self.columns])

    def _all(self, found: "QuerySet[Any]", now: datetime) -> Iterator[Row]:
        objects = found[:MAX_EXPORTED].iterator(chunk_size=CHUNK)
        while chunk := list(islice(objects, CHUNK)):
            yield from self.rows(chunk, now)

    def _of_query(self, request: PageRequest, shown: slice) -> Sequence[Row]:
        """One object more than the page shows, to see whether there are others."""
        return self.rows(list(self._sorted(request)[shown]), request.now)

    def _by_value(self, request: PageRequest) -> list[Row]:
        found = self.query(request)
        objects = list((found.order_by(*self.order) if isinstance(found, QuerySet) else found)[:MAX_EXPORTED])
        rows = [row for row in self.rows(objects, request.now) if self._shows(row, request)]
        column, is_descending = self._chosen(request)
        if column is None:
            return rows
        value = column.value
        known = sorted((row for row in rows if value(row) is not None), key=value, reverse=is_descending)  # type: ignore[arg-type]
        return [*known, *(row for row in rows if value(row) is None)]

    def _shows(self, row: Row, request: PageRequest) -> bool:
        """Whether search and filters leave a row of a list by value."""
        text = request.text(f"{self.prefix}q").casefold() if self.find else ""
        searched = (str(column.value(row)).casefold() for column in self.columns if column.name in self.find)
        return (not text or any(text in each for each in searched)) and all(
            str(column.value(row)) == value for column, value in self._chosen_values(request)
        )

    def _sorted(self, request: PageRequest) -> "QuerySet[Any]":
        column, is_descending = self._chosen(request)
        chosen = [] if column is None else [_ordered(name, is_descending) for name in column.order]
        found: QuerySet[Any] = self.query(request)
        if self.find and (text := request.text(f"{self.prefix}q")):
            found = found.filter(reduce(or_, (Q(**{f"{name}__icontains": text}) for name in self.find)))
        for narrowed, value in self._chosen_values(request):
            found = found.filter(**{narrowed.order[0]: value})
        return found.order_by(*chosen, *self.order)

    def _is_filtered(self, request: PageRequest) -> bool:
        own = any(request.text(name) for name in (f"{self.prefix}q", *self.filters))
        return own or bool(self._chosen_values(request))

    def _chosen_values(self, request: PageRequest) -> list[tuple[Column[Row], str]]:
        """The columns whose filter is in the URL, with the value that their rows have."""
        chosen = ((each, request.text(f"{self.prefix}{each.name}")) for each in self.columns if each.choices)
        return [(column, value) for column, value in chosen if value]

    def _choice(self, column: Column[Row], request: PageRequest) -> Choice:
        name, every = f"{self.prefix}{column.name}", f"every {column.label[:1].lower()}{column.label[1:]}"
        return replace(choose(request, name, every, column.choices), label=column.label)

    def _chosen(self, request: PageRequest) -> tuple[Column[Row] | None, bool]:
        """The column in the URL; unknown names are ignored."""
        text = request.text(f"{self.prefix}sort")
        name = text.removeprefix("-")
        found = next((each for each in self.columns if each.name == name and self._is_sortable(each)), None)
        return found, text.startswith("-")

    def _headings(self, request: PageRequest) -> tuple[Heading, ...]:
        chosen, is_descending = self._chosen(request)
        return tuple(
            _heading(column, column is chosen, is_descending, is_sortable=self._is_sortable(column))
            for column in self.columns
        )

    def _is_sortable(self, column: Column[Row]) -> bool:
        return self.by_value or bool(column.order)


class _Echo:
    """A file for `csv.writer` whose lines are returned instead of stored."""

    def write(self, line: str) -> str:
        return line


def _heading(column: Column[Any], is_chosen: bool, is_descending: bool, *, is_sortable: bool) -> Heading:
    turned = not is_descending if is_chosen else column.is_newest_first
    sort = f"{'-' if turned else ''}{column.name}" if is_sortable else ""
    direction = ("descending" if is_descending else "ascending") if is_chosen else ""
    return Heading(column.label, column.css, column.title, sort, direction)


def _ordered(name: str, is_descending: bool) -> OrderBy:
    """Rows without a value are last in both directions."""
    return F(name).desc(nulls_last=True) if is_descending else F(name).asc(nulls_last=True)


def cell_text(value: object) -> str:
    """A value as text of a CSV file that a spreadsheet never calculates."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="seconds")
    if isinstance(value, bool | int | float):
        return str(value)
    text = str(value).replace("\0", "")
    return f"'{text}" if text.startswith(FORMULA) else text
