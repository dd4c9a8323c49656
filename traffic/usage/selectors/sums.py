"""Reads sums of hours and, where these are current, of days, in one query. It is plain SQL, because pages read some
twenty sums and Django compiles each aggregate anew. It never writes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from django.db import connection

from traffic.usage.models import SummedDay
from traffic.usage.planning.figures import By, SummedDays, TimeParts, UsageQuery

_START = {By.HOUR: ("date_trunc('hour', hour, 'UTC')", "day"), By.DAY: ("date_trunc('day', hour, 'UTC')", "day")}
_START[By.MONTH] = ("date_trunc('month', hour, 'UTC')", "date_trunc('month', day)")
"""Start of a row's time, from its hour or its day. A day whose hours are not kept counts as its first hour."""
CHUNK = 2000


@dataclass(frozen=True, slots=True)
class SummedTables:
    """Tables of hours and of days with the same columns: `summed` ones, and `worst` ones of which the greatest counts.
    `hours_where` is a condition on hours, `where` on both."""

    hours: str
    days: str
    summed: tuple[str, ...]
    worst: tuple[str, ...] = ()
    where: str = "true"
    hours_where: str = "true"


def summed_days(query: UsageQuery) -> SummedDays:
    """Returns the days of a query that have sums, in one query."""
    within = (query.start.astimezone(UTC).date(), query.end.astimezone(UTC).date())
    known = list(SummedDay.objects.filter(day__range=within).values_list("day", "is_current", "has_hours"))
    return SummedDays(
        frozenset(day for day, is_current, _ in known if is_current),
        frozenset(day for day, _, has_hours in known if not has_hours),
    )


def read_sums(
    tables: SummedTables, query: UsageQuery, parts: TimeParts, column_of: Mapping[str, str], *, streamed: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Yields the start of each group (None for the whole time), its values, its sums and its worst values, latest first
    and then by value. `column_of`: column of each dimension. `streamed`: in constant memory, which takes three more
    round trips."""
    places = [column_of[name] for name in query.group]
    where, values = _chosen(query, column_of)
    selects, parameters = [], []
    for column, spans in (("hour", parts.hours), ("day", parts.days)):
        if spans:
            selects.append(_select(tables, query.by, column, places, f"{where} AND ({_within(column, len(spans))})"))
            parameters += [*values, *(moment for span in spans for moment in span)]
    if not selects:
        return
    found = [*(f"sum({name})" for name in tables.summed), *(f"max({name})" for name in tables.worst)]
    places = places if query.by is By.TOTAL else ["start", *places]
    begin = "NULL, " if query.by is By.TOTAL else ""
    statement = f"SELECT {begin}{', '.join([*places, *found])} FROM ({' UNION ALL '.join(selects)}) AS parts"  # noqa: S608
    if places:
        order = [f"{name} DESC" if name == "start" else name for name in places]
        statement += f" GROUP BY {', '.join(places)} ORDER BY {', '.join(order)}"
    else:
        statement += " HAVING count(*) > 0"
    with connection.chunked_cursor() if streamed else connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        while rows := cursor.fetchmany(CHUNK):
            yield from rows


def _select(tables: SummedTables, by: By, column: str, places: list[str], where: str) -> str:
    is_hour = column == "hour"
    names = [*places, *tables.summed, *tables.worst]
    if by is not By.TOTAL:
        of_hour, of_day = _START[by]
        names.append(f"{of_hour} AS start" if is_hour else f"{of_day}::timestamp AT TIME ZONE 'UTC' AS start")
    table, more = (tables.hours, tables.hours_where) if is_hour else (tables.days, "true")
    return f"SELECT {', '.join(names)} FROM {table} WHERE {tables.where} AND {more} AND {where}"  # noqa: S608


def _within(column: str, spans: int) -> str:
    last = "<" if column == "hour" else "<="
    return " OR ".join([f"{column} >= %s AND {column} {last} %s"] * spans)


def _chosen(query: UsageQuery, column_of: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Returns the condition of filters and selected groups, with its parameters."""
    conditions, values = ["true"], []
    for name, value in query.where:
        conditions.append(f"{column_of[name]} = %s")
        values.append(value)
    if query.only is not None and query.group:
        one = f"({' AND '.join(f'{column_of[name]} = %s' for name in query.group)})"
        conditions.append(f"({' OR '.join([one] * len(query.only)) or 'false'})")
        values += [value for group in query.only for value in group]
    return " AND ".join(conditions), values
