"""Sums past days of usage and costs, so that pages of weeks read one row a day instead of 24, and deletes expired hours
and days.

A day's sums are written from its hours in one transaction, so a repetition changes nothing. A transaction that changes
hours calls `days_reopen` first. Both lock the table of days, so either the sums include a change, or its day is marked
and its hours are read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.db import connection, models, transaction
from django.db.models import Min
from django.db.models.functions import TruncDate

from traffic.usage.models import (
    ACCOUNT,
    ACCOUNT_OF_SHARE,
    AMOUNTS,
    COUNTS,
    KIND,
    CellDay,
    CellHour,
    CostShare,
    CostShareDay,
    SummedDay,
    UsageDay,
    UsageHour,
)
from traffic.usage.planning.figures import HOURS_KEPT, ONE_DAY

DAYS_KEPT = timedelta(days=400)
COUNTED_AFTER = timedelta(minutes=10)
"""Time after the end of a day until its last hour is counted and split."""
_DAY_OF_HOUR = "(hour AT TIME ZONE 'UTC')::date"


@dataclass(frozen=True, slots=True)
class _Sums:
    """Rows of `days` are the sums of `hours` by `place`; of `worst`, the greatest value counts."""

    hours: type[models.Model]
    days: type[models.Model]
    place: tuple[str, ...]
    summed: tuple[str, ...]
    worst: tuple[str, ...] = ()

    def add(self, source: str) -> str:
        """Returns SQL that adds hours of a table to their days."""
        days = self.days._meta.db_table
        found = (*self.place, _DAY_OF_HOUR, *(f"sum({n})" for n in self.summed), *(f"max({n})" for n in self.worst))
        changes = (
            *(f"{name} = {days}.{name} + EXCLUDED.{name}" for name in self.summed),
            *(f"{name} = greatest({days}.{name}, EXCLUDED.{name})" for name in self.worst),
        )
        return f"""
            INSERT INTO {days} ({", ".join((*self.place, "day", *self.summed, *self.worst))})
            SELECT {", ".join(found)} FROM {source} GROUP BY {", ".join((*self.place, _DAY_OF_HOUR))}
            ON CONFLICT ({", ".join((*self.place, "day"))}) DO UPDATE SET {", ".join(changes)}
        """  # noqa: S608 - only names of tables and columns

    def write(self, day: date) -> None:
        """Replaces a day's sums."""
        self.days._default_manager.filter(day=day).delete()
        settled = "settled AND " if self.hours is CellHour else ""
        table = self.hours._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(self.add(f"{table} WHERE {settled}hour >= %s AND hour < %s"), _hours_of(day))

    def move(self, day: date) -> None:
        """Adds hours to their day and deletes them."""
        gone = f"WITH gone AS (DELETE FROM {self.hours._meta.db_table} WHERE hour >= %s AND hour < %s RETURNING *)"  # noqa: S608
        with connection.cursor() as cursor:
            cursor.execute(gone + self.add("gone"), _hours_of(day))


_SOURCES = ("cost_source", "energy_source", "carbon_source")
_OF_CELLS = (
    "machine_ms", "measured_uj", "refused", "cost", "idle", "energy_uj", "idle_uj", "carbon_ug", "idle_carbon_ug",
)  # fmt: skip
_OF_SHARES = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "energy_uj", "carbon_ug")
_CELLS = _Sums(CellHour, CellDay, KIND, _OF_CELLS, _SOURCES)
_ACCOUNTS = (
    _Sums(UsageHour, UsageDay, ACCOUNT, (*COUNTS, *AMOUNTS)),
    _Sums(CostShare, CostShareDay, (*KIND, *ACCOUNT_OF_SHARE), _OF_SHARES, _SOURCES),
)


def days_reopen(hours: Iterable[datetime]) -> None:
    """Marks the days of these hours, which the transaction is about to change: their hours are read until they are
    summed again."""
    days = {hour.astimezone(UTC).date() for hour in hours}
    SummedDay.objects.filter(day__in=days, is_current=True).update(is_current=False)


def days_sum(*, now: datetime) -> int:
    """Sums past days that changed or were never summed. A day waits until all its hours are settled. Returns the number
    of days."""
    return sum(_day_sum(day) for day in _days_due(now))


def days_trim(*, now: datetime) -> None:
    """Deletes expired hours of accounts, whose sums become final, and expired days."""
    first_kept = (now - HOURS_KEPT).astimezone(UTC).date()
    for day in _days_with_hours(before=first_kept):
        _day_expire(day)
    oldest = now - DAYS_KEPT
    CellHour.objects.filter(hour__lt=oldest).delete()
    for table in (UsageDay, CostShareDay, CellDay, SummedDay):
        table._default_manager.filter(day__lt=oldest.astimezone(UTC).date()).delete()


def _days_due(now: datetime) -> Iterator[date]:
    over = (now - COUNTED_AFTER).astimezone(UTC).date()
    begun: list[datetime | None] = [
        table._default_manager.aggregate(at=Min("hour"))["at"] for table in (UsageHour, CostShare, CellHour)
    ]
    first = min((hour.astimezone(UTC).date() for hour in begun if hour is not None), default=over)
    current = set(SummedDay.objects.filter(is_current=True).values_list("day", flat=True))
    days = (first + ONE_DAY * number for number in range((over - first).days))
    return (day for day in days if day not in current)


def _days_with_hours(*, before: date) -> list[date]:
    """Days whose accounts have hours, oldest first."""
    hours = {"hour__lt": _hours_of(before)[0]}
    found: set[Any] = set(SummedDay.objects.filter(day__lt=before, has_hours=True).values_list("day", flat=True))
    for sums in _ACCOUNTS:
        rows = sums.hours._default_manager.filter(**hours).order_by()
        found.update(rows.annotate(of=TruncDate("hour", tzinfo=UTC)).values_list("of", flat=True).distinct())
    return sorted(found)


@transaction.atomic
def _day_sum(day: date) -> bool:
    _lock_days()
    start, end = _hours_of(day)
    if CellHour.objects.filter(settled=False, hour__gte=start, hour__lt=end).exists():
        return False
    _CELLS.write(day)
    if not SummedDay.objects.filter(day=day, has_hours=False).exists():
        for sums in _ACCOUNTS:
            sums.write(day)
    SummedDay.objects.update_or_create(day=day, defaults={"is_current": True})
    return True


@transaction.atomic
def _day_expire(day: date) -> None:
    _lock_days()
    known = SummedDay.objects.filter(day=day).first() or SummedDay(day=day, is_current=False)
    for sums in _ACCOUNTS:
        if known.has_hours:
            sums.days._default_manager.filter(day=day).delete()
        sums.move(day)
    known.has_hours = False
    known.save()


def _lock_days() -> None:
    """Waits for transactions that called `days_reopen`, and makes others wait. Readers do not wait."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {SummedDay._meta.db_table} IN SHARE ROW EXCLUSIVE MODE")


def _hours_of(day: date) -> tuple[datetime, datetime]:
    start = datetime.combine(day, time.min, UTC)
    return start, start + ONE_DAY
