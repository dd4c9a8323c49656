"""Time ranges that pages and the API show: the last hour to the last 90 days, or the time between two moments. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from kernel.refusals import InvalidInput

HOUR_S, DAY_S = 3600, 86_400
LENGTHS_S = {
    "1h": HOUR_S,
    "6h": 6 * HOUR_S,
    "1d": DAY_S,
    "7d": 7 * DAY_S,
    "14d": 14 * DAY_S,
    "30d": 30 * DAY_S,
    "90d": 90 * DAY_S,
}
SHORTEST, LONGEST = timedelta(minutes=1), timedelta(days=366)


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges that a page offers, shortest first, and the one that it opens with."""

    names: tuple[str, ...]
    default: str

    def nearest(self, name: str) -> str:
        """The range with this name, or the shortest longer one if the page does not offer it."""
        if name not in LENGTHS_S:
            return self.default
        return next((one for one in self.names if LENGTHS_S[one] >= LENGTHS_S[name]), self.names[-1])


OF_LOAD = Ranges(("1h", "6h", "1d", "7d", "14d"), "1h")
"""Load history is kept for 14 days."""
OF_USAGE = Ranges(("1d", "7d", "30d", "90d"), "7d")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From `start` to `end`. `name` is one of `LENGTHS_S` if it ends now, and "" between two moments."""

    name: str
    start: datetime
    end: datetime

    @property
    def length(self) -> timedelta:
        return self.end - self.start

    @property
    def query(self) -> str:
        """Its part of a URL."""
        if self.name:
            return urlencode({"range": self.name})
        return urlencode({"from": _stamp(self.start), "to": _stamp(self.end)})


def last(name: str, now: datetime) -> TimeRange:
    return TimeRange(name, now - timedelta(seconds=LENGTHS_S[name]), now)


def parse_range(*, name: str, since: str, until: str, ranges: Ranges, now: datetime) -> TimeRange:
    """The range of `?range=`, or of `?from=` and `?to=`; the default without any. Raises InvalidInput."""
    if not since and not until:
        if name and name not in LENGTHS_S:
            message = f"{name!r} is not a range; it must be one of {', '.join(ranges.names)}"
            raise InvalidInput(field="range", rule="invalid_choice", message=message)
        return last(ranges.nearest(name or ranges.default), now)
    end = min(now, parse_moment("to", until)) if until else now
    start = parse_moment("from", since) if since else end - timedelta(seconds=LENGTHS_S[ranges.default])
    if end - start < SHORTEST:
        raise InvalidInput(field="from", rule="range", message="`from` must be at least a minute before `to` and now")
    if end - start > LONGEST:
        raise InvalidInput(field="from", rule="range", message=f"a range has at most {LONGEST.days} days")
    return TimeRange("", start, end)


def parse_moment(field: str, text: str) -> datetime:
    """A time in ISO 8601, in UTC unless it states another zone. Raises InvalidInput."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        message = f"{text[:40]!r} is not a time; `{field}` must be like 2026-11-30T14:00Z"
        raise InvalidInput(field=field, rule="invalid", message=message) from error


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
