"""Reads usage, summed by query parameters: whole days from their sums if these are current, other times from hours. It
never writes."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import TruncDay, TruncHour, TruncMonth

from fleet.faults.planning.report import TenantImpact
from traffic.usage.models import AMOUNTS, COUNTS, SummedDay, UsageDay, UsageHour
from traffic.usage.planning.figures import By, SummedDays, TimeParts, UsageQuery, split_time

COLUMN = {"tenant": "tenant", "key": "key", "deployment": "deployment", "class": "serving_class", "adapter": "adapter"}
"""Column of each dimension."""
SUMMED = (*COUNTS, *AMOUNTS)
_OF_HOUR = {By.HOUR: TruncHour, By.DAY: TruncDay, By.MONTH: TruncMonth}
NOTHING = dict.fromkeys(COUNTS, 0) | dict.fromkeys(AMOUNTS, Decimal(0))


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group: start of its time (None for the whole query), dimensions by name, and sums by column."""

    start: datetime | None
    group: dict[str, str]
    sums: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Groups, latest first and then by name, and totals. `truncated`: there are more groups."""

    rows: list[UsageRow]
    totals: dict[str, Any]
    truncated: bool = False


def usage_answer(query: UsageQuery, *, most: int) -> UsageAnswer:
    """Returns usage by group, in three queries, or six if there are more than `most` groups."""
    rows = list(itertools.islice(usage_stream(query), most + 1))
    if len(rows) <= most:
        return UsageAnswer(
            rows, {name: sum(row.sums[name] for row in rows) for name in SUMMED} if rows else {**NOTHING}
        )
    (total,) = usage_stream(replace(query, by=By.TOTAL, group=(), only=None))
    return UsageAnswer(rows[:most], total.sums, truncated=True)


def usage_stream(query: UsageQuery) -> Iterator[UsageRow]:
    """Yields groups, latest first and then by name. Groups of hours and days take constant memory. A month or the whole
    time may be partly in hours and partly in days, which are added up."""
    hours, days = ((_usage_row(found, query) for found in part) for part in usage_parts(query))
    if query.by in (By.HOUR, By.DAY):
        yield from heapq.merge(hours, days, key=lambda row: -_start_seconds(row.start))
    else:
        yield from _merged_rows(itertools.chain(hours, days))


def usage_parts(query: UsageQuery) -> tuple[Iterator[dict[str, Any]], Iterator[dict[str, Any]]]:
    """Returns sums of hours and of days, which are disjoint. Without hours, a day is not in a query by hour, and is
    whole in all others."""
    known = SummedDays() if query.by is By.HOUR else summed_days(query)
    parts = split_time(query.start, query.end, known.of_accounts, known.expired)
    hours = UsageHour.objects.filter(in_hours(parts))
    days = UsageDay.objects.filter(in_days(parts))
    return _summed_rows(hours, query, "hour"), _summed_rows(days, query, "day")


def summed_days(query: UsageQuery) -> SummedDays:
    """Returns the days of a query that have sums, in one query."""
    within = (query.start.astimezone(UTC).date(), query.end.astimezone(UTC).date())
    rows = SummedDay.objects.filter(day__range=within).values_list("day", "is_current", "has_hours")
    known = list(rows)
    return SummedDays(
        frozenset(day for day, is_current, _ in known if is_current),
        frozenset(day for day, _, has_hours in known if not has_hours),
    )


def in_hours(parts: TimeParts) -> Q:
    return _any_of([Q(hour__gte=start, hour__lt=end) for start, end in parts.hours])


def in_days(parts: TimeParts) -> Q:
    return _any_of([Q(day__range=days) for days in parts.days])


def _any_of(ranges: list[Q]) -> Q:
    return reduce(or_, ranges) if ranges else Q(pk__in=())


def _midnight(at: date) -> datetime:
    return at if isinstance(at, datetime) else datetime(at.year, at.month, at.day, tzinfo=UTC)


def _merged_rows(parts: Iterable[UsageRow]) -> list[UsageRow]:
    groups: dict[tuple[Any, ...], UsageRow] = {}
    for row in parts:
        place = (row.start, *row.group.values())
        if place in groups:
            sums = groups[place].sums
            sums.update({name: sums[name] + row.sums[name] for name in SUMMED})
        else:
            groups[place] = row
    return sorted(groups.values(), key=lambda row: (-_start_seconds(row.start), *row.group.values()))


def _usage_row(found: dict[str, Any], query: UsageQuery) -> UsageRow:
    group = {name: found[COLUMN[name]] for name in query.group}
    return UsageRow(found["start"], group, {name: found[name] for name in SUMMED})


def _start_seconds(start: datetime | None) -> float:
    return start.timestamp() if start else 0.0


def _summed_rows(rows: "QuerySet[Any]", query: UsageQuery, time: str) -> Iterator[dict[str, Any]]:
    columns = [COLUMN[name] for name in query.group]
    return grouped_sums(chosen_rows(rows, query, COLUMN), query, time, columns, {name: Sum(name) for name in SUMMED})


def chosen_rows(rows: "QuerySet[Any]", query: UsageQuery, column_of: Mapping[str, str]) -> "QuerySet[Any]":
    rows = rows.filter(**{column_of[name]: value for name, value in query.where})
    if query.only is None:
        return rows
    columns = [column_of[name] for name in query.group]
    return rows.filter(_any_of([Q(**dict(zip(columns, group, strict=True))) for group in query.only]))


def grouped_sums(
    rows: "QuerySet[Any]", query: UsageQuery, time: str, columns: list[str], sums: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the sums of each group and its `start`, latest first; nothing if there are no rows. `time` is the column
    `hour` or `day`."""
    by = query.by
    if by is not By.TOTAL:
        if time == "hour":
            rows = rows.annotate(start=_OF_HOUR[by]("hour", tzinfo=UTC))
        else:  # a day without hours counts as its first hour
            rows = rows.annotate(start=TruncMonth("day") if by is By.MONTH else F("day"))
        groups = rows.values("start", *columns).annotate(**sums)
        groups = groups.order_by("-start", *columns)
        # A cursor in the database takes three more round trips, so that few rows are read without one.
        for row in groups.iterator(chunk_size=2000) if query.only is None and columns else groups:
            yield {**row, "start": _midnight(row["start"])}
    elif columns:
        for row in rows.order_by().values(*columns).annotate(**sums):
            yield {"start": None, **row}
    else:
        whole = rows.aggregate(**sums)
        if any(value is not None for value in whole.values()):
            yield {"start": None, **whole}


TENANTS_NAMED = 20


def tenants_hit(deployments: Iterable[str], start: datetime, end: datetime) -> tuple[TenantImpact, ...]:
    """Tenants with failed requests to these deployments in the hours from `start` to `end`, most failures first. One
    query."""
    first = start.replace(minute=0, second=0, microsecond=0)
    rows = UsageHour.objects.filter(hour__range=(first, end), deployment__in=list(deployments))
    failed, arrived = F("errors") + F("refused"), F("requests") + F("refused")
    sums = rows.order_by().values("tenant").annotate(hit=Sum(failed), seen=Sum(arrived)).filter(hit__gt=0)
    most = sums.order_by("-hit", "tenant").values_list("tenant", "hit", "seen")[:TENANTS_NAMED]
    return tuple(TenantImpact(*each) for each in most)
