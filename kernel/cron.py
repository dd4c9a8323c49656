"""Cron expressions in a time zone, as Debian's cron reads them (cronsim). Pure.

A time that a clock change skips occurs at the end of the gap; a time that it repeats occurs once, the first time.
Expressions with `*` in the hour or minute follow elapsed time instead: they occur in every real hour."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

YEAR = timedelta(days=366)
SAMPLE_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
"""Any year serves to check that an expression occurs at least once a year."""
FIELDS = "five fields (minute, hour, day of the month, month, day of the week), such as 0 8 * * MON-FRI"


@cache
def time_zone(name: str) -> ZoneInfo:
    """Raises ValueError if the IANA database has no such name."""
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise ValueError(f"{name[:64]!r}; it must be a name of the IANA database, such as Europe/Berlin") from None


def check_cron(cron: str) -> None:
    """Raises ValueError for an expression that lacks one of five fields, or does not occur every year."""
    try:
        if len(cron.split()) != 5:
            raise CronSimError("Wrong number of fields")
        first = next(CronSim(cron, SAMPLE_YEAR), None)
    except CronSimError as error:
        raise ValueError(f"{cron!r}: {str(error).lower()}; it must have {FIELDS}") from None
    if first is None or first - SAMPLE_YEAR > YEAR:
        raise ValueError(f"{cron!r}; it must occur every year")


def times_before(cron: str, zone: str, now: datetime) -> Iterator[datetime]:
    """Yields the times of an expression in UTC, newest first, from `now` on, which is included."""
    after = now.astimezone(time_zone(zone)).replace(microsecond=0) + timedelta(seconds=1)
    return (at.astimezone(UTC) for at in CronSim(cron, after, reverse=True))


def time_after(cron: str, zone: str, now: datetime) -> datetime:
    """Returns the next time of an expression in UTC, after `now`."""
    return next(CronSim(cron, now.astimezone(time_zone(zone)))).astimezone(UTC)
