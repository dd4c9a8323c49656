"""Exports usage and costs as Parquet, and each past day as objects in a bucket. Objects are named by day and written
once (`If-None-Match`), so readers can cache them. If the result of a write was lost, the object's digest shows it."""

import io
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from django.db.models import Min
from django.db.models.functions import TruncDate

from fleet.clouds.aws.calls import CallFailed
from fleet.clouds.aws.objects import OtherObject, bucket_region, object_put_once
from kernel.leases import lease_during
from traffic.usage.models import COUNTS, CellHour, UsageExport, UsageHour
from traffic.usage.planning.figures import (
    AMOUNT_COLUMNS,
    COST_COLUMNS,
    COST_DIMENSIONS,
    COUNT_COLUMNS,
    DIMENSIONS,
    FIGURE_COLUMNS,
    HOURS_KEPT,
    OF_ACCOUNTS,
    SOURCES,
    TOKEN_COLUMNS,
    By,
    CostRow,
    TableRow,
    UsageQuery,
    csv_pieces,
)
from traffic.usage.planning.figures import COST_AMOUNT_COLUMNS as COST_AMOUNTS
from traffic.usage.selectors.costs import cost_rows
from traffic.usage.selectors.usage import UsageRow, usage_stream
from traffic.usage.services.day_sums import COUNTED_AFTER

PARQUET_TYPE = "application/vnd.apache.parquet"
MOST_PARQUET_ROWS = 1_000_000
"""A Parquet table is held in memory as a whole, at most about 300 MB."""
LEASE = "traffic:usage-export"
LEASE_TTL_S = 300.0
DAYS_A_PASS = 7
KIND_DIMENSIONS = tuple(name for name in COST_DIMENSIONS if name not in OF_ACCOUNTS)
"""Costs are written by machines with idle time; accounts are in the day's usage."""

log = logging.getLogger(__name__)


class TooManyRows(ValueError):
    """More rows than fit in memory; the text says how to get fewer."""


def table_rows(rows: Iterable[UsageRow]) -> Iterator[TableRow]:
    for row in rows:
        counts = {name: row.sums[name] for name in COUNTS}
        yield TableRow(row.start, row.group, counts, row.sums["charged"], row.sums["machine_cost"])


def parquet_table(rows: Iterable[TableRow]) -> bytes:
    """Returns a Parquet file: times in microseconds (UTC), counters as integers, amounts as decimals. Raises
    TooManyRows if the table has too many rows."""
    from arro3.core import Array, DataType

    held: list[TableRow] = []
    for row in rows:
        held.append(row)
        if len(held) > MOST_PARQUET_ROWS:
            raise TooManyRows(f"more than {MOST_PARQUET_ROWS:,} rows: narrow the time or group by less, or take CSV")
    columns: dict[str, Any] = {"start": _time_column(row.start for row in held)}
    for name in DIMENSIONS:
        columns[name] = Array([row.group.get(name, "") for row in held], type=DataType.string())
    for name in COUNT_COLUMNS:
        columns[name] = Array([row.counts[name] for row in held], type=DataType.int64())
    for name, amounts in zip(AMOUNT_COLUMNS, ("charged", "machine_cost"), strict=True):
        texts = Array([f"{getattr(row, amounts):f}" for row in held], type=DataType.string())
        columns[name] = texts.cast(DataType.decimal128(38, 12))
    return _parquet_of(columns)


def cost_parquet(rows: Iterable[CostRow]) -> bytes:
    """Returns a Parquet file: times in microseconds (UTC), amounts and figures as decimals or null. Raises TooManyRows
    if the table has too many rows."""
    from arro3.core import Array, DataType

    held = [row for row, _ in zip(rows, range(MOST_PARQUET_ROWS + 1), strict=False)]
    if len(held) > MOST_PARQUET_ROWS:
        raise TooManyRows(f"more than {MOST_PARQUET_ROWS:,} rows: narrow the time or group by less, or take CSV")

    def decimals(texts: list[str | None]) -> Any:
        return Array(texts, type=DataType.string()).cast(DataType.decimal128(38, 6))

    columns: dict[str, Any] = {"start": _time_column([row.start for row in held])}
    for name in COST_DIMENSIONS:
        columns[name] = Array([row.group.get(name, "") for row in held], type=DataType.string())
    for name in TOKEN_COLUMNS:
        columns[name] = Array([getattr(row.sums, name) for row in held], type=DataType.int64())
    amounts = [row.amounts() for row in held]
    for name in COST_AMOUNTS:
        columns[name] = decimals([each[name] for each in amounts])
    figures = [row.figure_texts() for row in held]
    for name in FIGURE_COLUMNS:
        columns[name] = decimals([each[name] for each in figures])
    for name in SOURCES:
        columns[name] = Array([row.sources()[name] for row in held], type=DataType.string())
    return _parquet_of(columns)


def _time_column(starts: Iterable[datetime | None]) -> Any:
    from arro3.core import Array, DataType

    micros = [round(start.timestamp()) * 1_000_000 if start else None for start in starts]
    return Array(micros, type=DataType.int64()).cast(DataType.timestamp("us", tz="UTC"))


def _parquet_of(columns: dict[str, Any]) -> bytes:
    from arro3.core import Table
    from arro3.io import write_parquet

    file = io.BytesIO()
    write_parquet(Table.from_pydict(columns), file)
    return file.getvalue()


def usage_export_days(*, target: str, now: datetime) -> list[str]:
    """Writes past days that are not yet in the configured bucket, oldest first, one process at a time. Returns the
    names of objects. Raises ValueError if the target is not a bucket URL."""
    if not target:
        return []
    bucket, prefix = parse_target(target)
    with lease_during(name=LEASE, ttl_s=LEASE_TTL_S, now=now) as is_ours:
        try:
            days = _days_due(target, now) if is_ours else ()
            return [name for day in days for name in _write_day(target, bucket, prefix, day, now)]
        except (CallFailed, OtherObject) as error:
            log.warning("cannot export usage to %s: %s", target, error)
            return []


def parse_target(target: str) -> tuple[str, str]:
    """Returns bucket and prefix of `s3://bucket/prefix`. Raises ValueError if it is not a bucket URL."""
    parts = urlsplit(target)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{target!r} is not a bucket URL; use s3://bucket/prefix")
    return parts.netloc, parts.path.strip("/")


def _days_due(target: str, now: datetime) -> list[date]:
    """Returns past days with usage whose hours are kept and that lack one of their objects."""
    over = (now - COUNTED_AFTER).astimezone(UTC).date()
    first = (now - HOURS_KEPT).astimezone(UTC).date() + timedelta(days=1)
    begins = datetime.combine(first, datetime.min.time(), UTC)
    first_open = CellHour.objects.filter(settled=False).aggregate(at=Min("hour"))["at"]
    if first_open is not None:  # objects are never replaced, so it waits until all hours are split
        over = min(over, first_open.astimezone(UTC).date())
    within = {"hour__gte": begins, "hour__lt": datetime.combine(over, datetime.min.time(), UTC)}
    used, ran = (
        rows.annotate(day=TruncDate("hour", tzinfo=UTC)).order_by().values_list("day", flat=True).distinct()
        for rows in (UsageHour.objects.filter(**within), CellHour.objects.filter(**within))
    )
    there = set(UsageExport.objects.filter(target=target[:500], day__gte=first).values_list("name", flat=True))
    return [day for day in sorted({*used, *ran}) if not {name for name, _ in _day_objects(day)} <= there][:DAYS_A_PASS]


def _day_objects(day: date) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{what}-{day}.{ending}", kind)
        for what in ("usage", "costs")
        for ending, kind in (("csv", "text/csv; charset=utf-8"), ("parquet", PARQUET_TYPE))
    )


def _write_day(target: str, bucket: str, prefix: str, day: date, now: datetime) -> Iterator[str]:
    begins = datetime.combine(day, datetime.min.time(), UTC)
    query = UsageQuery(begins, begins + timedelta(days=1), By.HOUR, DIMENSIONS)
    used = list(table_rows(usage_stream(query)))
    costs = cost_rows(replace(query, group=KIND_DIMENSIONS))
    bodies: dict[str, tuple[Callable[[], bytes], Callable[[], bytes]]] = {
        "usage": (lambda: b"".join(csv_pieces(used)), lambda: parquet_table(used)),
        "costs": (lambda: b"".join(csv_pieces(costs, COST_COLUMNS)), lambda: cost_parquet(costs)),
    }
    for name, kind in _day_objects(day):
        as_csv, as_parquet = bodies[name.partition("-")[0]]
        body = as_csv() if name.endswith(".csv") else as_parquet()
        key = f"{prefix}/{name}" if prefix else name
        digest = object_put_once(bucket_region(), bucket, key, body, kind=kind)
        columns = {"day": day, "sha256": digest, "at": now}
        UsageExport.objects.get_or_create(target=target[:500], name=name, defaults=columns)
        yield name
