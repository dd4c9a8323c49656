"""Lists: one declaration for each, with its columns and query. This module sorts by the columns, pages, keeps all of it
in the URL, and exports the same rows as CSV. Reads only."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Generic, TypeVar

from django.db.models import F, OrderBy, QuerySet
from django.http import StreamingHttpResponse

from controlplane.dashboard.fragments import PageRequest

Row = TypeVar("Row")
ROWS_SHOWN = 100
MAX_EXPORTED = 50_000
"""Rows of one export. At 5,000 nodes every list but events and audit records is complete."""
CHUNK = 500
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet would calculate a cell that begins so: https://owasp.org/www-community/attacks/CSV_Injection"""


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column. `value`: of a row, as exported. `order`: the columns of the query to sort by, () if it cannot be
    sorted; `is_newest_first`: the first click sorts it in descending order. `css`: its classes."""

    name: str
    label: str
    value: Callable[[Row], object]
    order: tuple[str, ...] = ()
    css: str = ""
    title: str = ""
    is_newest_first: bool = False


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
    narrow it. `exports`: it can be downloaded. `prefix`: of its
    parameters; `found`: the text that it is searched for; `above`: what its template shows besides rows."""

    rows: tuple[Row, ...]
    more: bool
    filtered: bool
    page: int
    headings: tuple[Heading, ...]
    exports: bool = True
    prefix: str = ""
    found: str = ""
    above: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class List(Generic[Row]):
    """A list. `query`: the objects that the request's filter leaves; `rows`: their rows, in a constant number of
    queries. `order`: by which they are sorted without a choice; its last column makes the order unique. `filters`: the
    parameters that `query` reads. `by_value`: sorts all rows by the values that they show, for short lists whose rows
    are computed; then `query` may return a sequence that is in order. `prefix`: of `sort` and `page` in the URL, such
    as `builds-`, for the second list of a page; `parts/find.html` is its filter."""

    name: str
    columns: tuple[Column[Row], ...]
    query: Callable[[PageRequest], Any]
    rows: Callable[[Sequence[Any], datetime], Sequence[Row]]
    order: tuple[str, ...]
    filters: tuple[str, ...] = ("q",)
    by_value: bool = False
    prefix: str = ""

    def page(self, request: PageRequest) -> ListPage[Row]:
        number = request.page_of(self.prefix)
        shown = slice((number - 1) * ROWS_SHOWN, number * ROWS_SHOWN + 1)
        found = self._by_value(request)[shown] if self.by_value else self._of_query(request, shown)
        return ListPage(
            rows=tuple(found[:ROWS_SHOWN]),
            more=len(found) > ROWS_SHOWN,
            filtered=any(request.text(name) for name in self.filters),
            page=number,
            headings=self._headings(request),
            prefix=self.prefix,
            found=request.text(f"{self.prefix}q"),
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
        return StreamingHttpResponse(self._lines(request), content_type="text/csv; charset=utf-8", headers=headers)

    def _lines(self, request: PageRequest) -> Iterator[str]:
        writer = csv.writer(_Echo())
        yield writer.writerow([column.label for column in self.columns])
        for row in self._by_value(request) if self.by_value else self._all(request):
            yield writer.writerow([cell_text(column.value(row)) for column in self.columns])

    def _all(self, request: PageRequest) -> Iterator[Row]:
        objects = self._sorted(request)[:MAX_EXPORTED].iterator(chunk_size=CHUNK)
        while chunk := list(islice(objects, CHUNK)):
            yield from self.rows(chunk, request.now)

    def _of_query(self, request: PageRequest, shown: slice) -> Sequence[Row]:
        """One object more than the page shows, to see whether there are others."""
        return self.rows(list(self._sorted(request)[shown]), request.now)

    def _by_value(self, request: PageRequest) -> list[Row]:
        found = self.query(request)
        objects = list((found.order_by(*self.order) if isinstance(found, QuerySet) else found)[:MAX_EXPORTED])
        rows, (column, is_descending) = list(self.rows(objects, request.now)), self._chosen(request)
        if column is None:
            return rows
        value = column.value
        known = sorted((row for row in rows if value(row) is not None), key=value, reverse=is_descending)  # type: ignore[arg-type]
        return [*known, *(row for row in rows if value(row) is None)]

    def _sorted(self, request: PageRequest) -> "QuerySet[Any]":
        column, is_descending = self._chosen(request)
        chosen = [] if column is None else [_ordered(name, is_descending) for name in column.order]
        found: QuerySet[Any] = self.query(request)
        return found.order_by(*chosen, *self.order)

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


def export_of(*lists: List[Any]) -> Callable[[PageRequest], StreamingHttpResponse]:
    """The export of a page with several lists: of the one whose prefix is in the URL, else of the first."""

    def export(request: PageRequest) -> StreamingHttpResponse:
        return next((each for each in lists if each.prefix == request.text("list")), lists[0]).export(request)

    return export


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
