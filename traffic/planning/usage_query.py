"""What may be requested of usage: which rows, by which dimensions and times they are added up. Pure; texts from outside
come in through `parse_usage_query`, whose refusals name the parameter."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.states import ServingClass

DIMENSIONS = ("tenant", "key", "deployment", "class", "adapter")
"""What rows are grouped and filtered by, in this order."""
UNGROUPED = "none"
DEFAULT_SPAN = timedelta(days=7)
MOST_SPAN = timedelta(days=401)
"""As long as days are kept."""
HOURS_KEPT = timedelta(days=90)
"""As long as hours are; what is older is known by the day."""
_AGO = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
MOST_LETTERS = 160
"""As long as the longest of the columns, which holds references of versions."""


class By(StrEnum):
    """The time that one row is about; `total`: all of it."""

    TOTAL = "total"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


class BadQuery(ValueError):
    """`field` is the parameter that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """From `start` (included) to `end`. `where` pairs dimensions with the one value that counts."""

    start: datetime
    end: datetime
    by: By = By.TOTAL
    group: tuple[str, ...] = ("tenant",)
    where: tuple[tuple[str, str], ...] = ()


def parse_usage_query(
    given: Mapping[str, str], now: datetime, dimensions: tuple[str, ...] = DIMENSIONS, group: str = "tenant"
) -> UsageQuery:
    """The query that these parameters state: dimensions, `from`, `to`, `by` and `group`, which is `group` if it is left
    out.

    Raises:
        BadQuery: one of them cannot be meant.
    """
    end = parse_moment("to", given["to"], now) if "to" in given else now
    start = parse_moment("from", given["from"], now) if "from" in given else end - DEFAULT_SPAN
    if start >= end:
        raise BadQuery("from", f"`from` ({start:%Y-%m-%dT%H:%M:%SZ}) must be before `to` ({end:%Y-%m-%dT%H:%M:%SZ})")
    if end - start > MOST_SPAN:
        raise BadQuery("from", f"at most {MOST_SPAN.days} days can be requested at once")
    where = tuple((name, _value(name, given[name])) for name in dimensions if name in given)
    groups = _group(given.get("group", group), dimensions)
    return UsageQuery(start, end, _by(given.get("by", By.TOTAL)), groups, where)


def parse_moment(field: str, text: str, now: datetime) -> datetime:
    """`7d`, `12h` or `2w` ago, a date (`2026-11-01`, its beginning in UTC), or a moment of RFC 3339.

    Raises:
        BadQuery: it is none of these.
    """
    if ago := _AGO.fullmatch(text):
        span = int(ago[1]) * _UNITS[ago[2]]
        if span <= timedelta(days=36_500):
            return now - span
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        if moment.tzinfo is not None and 2000 <= moment.year <= 9000:
            return moment.astimezone(UTC)
    except ValueError:
        pass
    forms = "`7d`, `12h`, `2w` (ago), a date `2026-11-01`, or `2026-11-01T12:00:00Z`"
    raise BadQuery(field, f"`{field}` must be {forms}, not {text[:40]!r}")


def _by(text: str) -> By:
    try:
        return By(text)
    except ValueError:
        raise BadQuery("by", f"`by` must be one of {', '.join(By)}, not {text[:40]!r}") from None


def _group(text: str, dimensions: tuple[str, ...]) -> tuple[str, ...]:
    """Dimensions with commas between them; `none`: everything is one row."""
    named = [] if text == UNGROUPED else [name.strip() for name in text.split(",")]
    if wrong := [name for name in named if name not in dimensions]:
        raise BadQuery("group", f"`group` may name {', '.join(dimensions)}, or be {UNGROUPED}, not {wrong[0][:40]!r}")
    return tuple(name for name in dimensions if name in named)


def _value(name: str, text: str) -> str:
    if not 0 < len(text) <= MOST_LETTERS or not text.isprintable():
        raise BadQuery(name, f"`{name}` must be 1 to {MOST_LETTERS} letters")
    if name == "class" and text not in set(ServingClass):
        raise BadQuery(name, f"`class` must be one of {', '.join(ServingClass)}, not {text[:40]!r}")
    return text.removeprefix("sw_") if name == "key" else text
