"""Reads usage, summed by query parameters: whole days from their sums if these are current, other times from hours. It
never writes."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db.models import F, Sum

from fleet.faults.planning.report import TenantImpact
from traffic.usage.models import AMOUNTS, COUNTS, UsageHour
from traffic.usage.planning.figures import By, SummedDays, UsageQuery, split_time
from traffic.usage.selectors.sums import SummedTables, read_sums, summed_days

COLUMN = {"tenant": "tenant", "key": "key", "deployment": "deployment", "class": "serving_class", "adapter": "adapter"}
"""Column of each dimension."""
SUMMED = (*COUNTS, *AMOUNTS)
_TABLES = SummedTables("traffic_usagehour", "traffic_usageday", SUMMED)
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
    """Returns usage by group, in two queries, or four if there are more than `most` groups."""
    rows = list(itertools.islice(usage_stream(query), most + 1))
    if len(rows) <= most:
        return UsageAnswer(rows, {name: sum((row.sums[name] for row in rows), none) for name, none in NOTHING.items()})
    (total,) = usage_stream(replace(query, by=By.TOTAL, group=(), only=None))
    return UsageAnswer(rows[:most], total.sums, truncated=True)


def usage_stream(query: UsageQuery) -> Iterator[UsageRow]:
    """Yields groups, latest first and then by name; groups by time in constant memory. Without hours, a day is not in a
    query by hour, and is whole in all others."""
    known = SummedDays() if query.by is By.HOUR else summed_days(query)
    parts = split_time(query.start, query.end, known.of_accounts, known.expired)
    streamed = query.by is not By.TOTAL and query.only is None
    dimensions = len(query.group)
    for start, *found in read_sums(_TABLES, query, parts, COLUMN, streamed=streamed):
        sums = dict(zip(SUMMED, found[dimensions:], strict=True))
        sums |= {name: int(sums[name]) for name in COUNTS}  # sums of whole numbers are decimals in PostgreSQL
        yield UsageRow(start, dict(zip(query.group, found[:dimensions], strict=True)), sums)


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
