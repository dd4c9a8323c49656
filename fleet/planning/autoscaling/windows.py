"""Times at which there should be at least so many cells: a cron expression says when a window begins, in a time zone,
and it lasts for a while. Pure: the time is an argument."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta

from kernel.constraints import InvalidField

WINDOWS_MOST = 20
YEAR = timedelta(days=366)
A_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
"""Any will do to see whether a window comes at least once a year."""


class ScheduleWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At least `cells` cells (0: the range begins at 0 meanwhile) for `for_s` seconds from each moment that `cron`
    names: minute, hour, day of the month, month, day of the week, as in `time_zone`. `region`: in this one alone;
    empty: in each that has a range."""

    cron: Annotated[str, Meta(min_length=9, max_length=100)]
    for_s: Annotated[float, Meta(ge=60, le=7 * 86_400)]
    cells: Annotated[int, Meta(ge=0, le=1000)]
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"
    region: Annotated[str, Meta(max_length=64)] = ""


def check_window(window: ScheduleWindow, path: str) -> None:
    """Raises:
    InvalidField: no such time zone, no cron expression of five fields, or one that names no moment in a year.
    """
    try:
        _zone(window.time_zone)
    except (KeyError, OSError, ValueError):
        raise InvalidField(
            f"{path}.time_zone",
            f"{path}.time_zone is {window.time_zone!r}; it must be a name of the IANA database, such as Europe/Berlin",
        ) from None
    five = "five fields (minute, hour, day of the month, month, day of the week), such as 0 8 * * MON-FRI"
    try:
        if len(window.cron.split()) != 5:
            raise CronSimError("Wrong number of fields")
        first = next(CronSim(window.cron, A_YEAR), None)
    except CronSimError as error:
        why = str(error).lower()
        raise InvalidField(f"{path}.cron", f"{path}.cron is {window.cron!r}: {why}; it must have {five}") from None
    if first is None or first - A_YEAR > YEAR:
        raise InvalidField(f"{path}.cron", f"{path}.cron is {window.cron!r}; it must name a moment of every year")


def window_in_force(windows: Iterable[ScheduleWindow], region: str, now: datetime) -> ScheduleWindow | None:
    """Of the windows that are open in a region the one that wants most; None: none is."""
    theirs = (window for window in windows if window.region in ("", region))
    return max((window for window in theirs if _is_open(window, now)), key=lambda one: one.cells, default=None)


def _is_open(window: ScheduleWindow, now: datetime) -> bool:
    began = last_began(window, now)
    return began is not None and now - began < timedelta(seconds=window.for_s)


def last_began(window: ScheduleWindow, now: datetime) -> datetime | None:
    """When the window last began, `now` included. Times that the clock's change leaves out or has twice are treated as
    by Debian's cron (cronsim)."""
    after = now.astimezone(_zone(window.time_zone)).replace(microsecond=0) + timedelta(seconds=1)
    return next(CronSim(window.cron, after, reverse=True), None)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
