"""Usage added up as somebody requests it, from hours and, where those are no longer kept, from days."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import QuerySet, Sum
from django.db.models.functions import TruncDay, TruncHour, TruncMonth

from traffic.models import UsageDay, UsageHour
from traffic.models.usage import AMOUNTS, COUNTS
from traffic.planning.usage_query import By, UsageQuery

COLUMN = {"tenant": "tenant", "key": "key", "deployment": "deployment", "class": "serving_class", "adapter": "adapter"}
"""Dimension -> its column."""
SUMMED = (*COUNTS, *AMOUNTS)
TRUNCATE = {By.HOUR: TruncHour, By.DAY: TruncDay, By.MONTH: TruncMonth}
NOTHING = dict.fromkeys(COUNTS, 0) | dict.fromkeys(AMOUNTS, Decimal(0))
TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group: the beginning of its time (None: all of it), its dimensions by name, and its sums by column."""

    start: datetime | None
    group: dict[str, str]
    sums: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Groups, latest first and then by name, and the sums of all. `truncated`: there are more groups."""

    rows: list[UsageRow]
    totals: dict[str, Any]
    truncated: bool = False


def usage_answer(query: UsageQuery, *, most: int) -> UsageAnswer:
    """Usage by group, in four queries."""
    rows = list(itertools.islice(usage_stream(query), most + 1))
    whole = replace(query, by=By.TOTAL, group=())
    totals = _merged(usage_parts(whole), whole)
    return UsageAnswer(rows[:most], totals[0].sums if totals else dict(NOTHING), len(rows) > most)


def usage_stream(query: UsageQuery) -> Iterator[UsageRow]:
    """The groups, one after the other, so that any number of them takes no more memory than a few: latest first and
    then by name. A month, or all of the time, may be partly in hours and partly in days: those are read first."""
    if query.by in (By.HOUR, By.DAY):
        yield from (_row(found, query) for found in usage_parts(query))
    else:
        yield from _merged(usage_parts(query), query)


def usage_parts(query: UsageQuery) -> Iterator[dict[str, Any]]:
    """Sums out of hours, then out of days that have none any more. No group of a day or an hour is in both."""
    hours = UsageHour.objects.filter(hour__gte=query.start, hour__lt=query.end)
    yield from _sums(hours, query, "hour")
    if query.by is not By.HOUR:
        days = UsageDay.objects.filter(day__gte=query.start.date(), day__lte=(query.end - TICK).date())
        yield from _sums(days, query, "day")


def _merged(parts: Iterable[dict[str, Any]], query: UsageQuery) -> list[UsageRow]:
    groups: dict[tuple[Any, ...], UsageRow] = {}
    for part in parts:
        row = _row(part, query)
        place = (row.start, *row.group.values())
        if place in groups:
            sums = groups[place].sums
            sums.update({name: sums[name] + row.sums[name] for name in SUMMED})
        else:
            groups[place] = row
    return sorted(groups.values(), key=lambda row: (-_seconds(row.start), *row.group.values()))


def _row(found: dict[str, Any], query: UsageQuery) -> UsageRow:
    start = found["start"]
    if start is not None and not isinstance(start, datetime):
        start = datetime(start.year, start.month, start.day, tzinfo=UTC)
    group = {name: found[COLUMN[name]] for name in query.group}
    return UsageRow(start, group, {name: found[name] for name in SUMMED})


def _seconds(start: datetime | None) -> float:
    return start.timestamp() if start else 0.0


def _sums(rows: "QuerySet[Any]", query: UsageQuery, time: str) -> Iterator[dict[str, Any]]:
    rows = rows.filter(**{COLUMN[name]: value for name, value in query.where}).order_by()
    names = [COLUMN[name] for name in query.group]
    sums = {name: Sum(name) for name in SUMMED}
    if query.by is not By.TOTAL:
        grouped = rows.annotate(start=TRUNCATE[query.by](time)).values("start", *names).annotate(**sums)
        yield from grouped.order_by("-start", *names).iterator(chunk_size=2000)
    elif names:
        for row in rows.values(*names).annotate(**sums).iterator(chunk_size=2000):
            yield {"start": None, **row}
    elif (row := rows.aggregate(**sums))["requests"] is not None:
        yield {"start": None, **row}
