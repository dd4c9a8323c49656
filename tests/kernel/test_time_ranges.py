"""A range in a URL is one of a page's, or lies between two moments; other texts are refused by name."""

from datetime import UTC, datetime, timedelta

import pytest

from kernel.refusals import InvalidInput
from kernel.time_ranges import OF_LOAD, OF_USAGE, Ranges, TimeRange, parse_range

NOW = datetime(2026, 11, 30, 14, 0, tzinfo=UTC)


def parse(name: str = "", since: str = "", until: str = "", ranges: Ranges = OF_LOAD) -> TimeRange:
    return parse_range(name=name, since=since, until=until, ranges=ranges, now=NOW)


@pytest.mark.parametrize(
    ("name", "ranges", "shown"),
    [
        ("", OF_LOAD, "1h"),
        ("6h", OF_LOAD, "6h"),
        ("", OF_USAGE, "7d"),
        ("6h", OF_USAGE, "1d"),
        ("90d", OF_LOAD, "14d"),
    ],
)
def test_a_page_shows_the_nearest_range_that_it_offers(name: str, ranges: Ranges, shown: str) -> None:
    assert parse(name, ranges=ranges).name == shown


def test_a_range_between_two_moments_is_in_utc_and_ends_now_at_the_latest() -> None:
    given = parse(since="2026-11-30T12:00+02:00", until="2027-01-01T00:00")
    assert given == TimeRange("", datetime(2026, 11, 30, 10, 0, tzinfo=UTC), NOW)
    assert given.query == "from=2026-11-30T10%3A00%3A00Z&to=2026-11-30T14%3A00%3A00Z"
    assert parse(until="2026-11-30T12:00Z").length == timedelta(hours=1)


@pytest.mark.parametrize(
    ("name", "since", "until", "field", "why"),
    [
        ("9y", "", "", "range", "'9y' is not a range; it must be one of 1h, 6h, 1d, 7d, 14d"),
        ("", "noon", "", "from", "'noon' is not a time; `from` must be like 2026-11-30T14:00Z"),
        ("", "0001-01-01T00:00+14:00", "", "from", "is not a time"),
        ("", "2026-11-30T13:59:30Z", "", "from", "at least a minute"),
        ("", "2020-01-01T00:00Z", "", "from", "at most 366 days"),
        ("", "2026-11-30T12:00Z", "x" * 5000, "to", "is not a time"),
    ],
)
def test_other_texts_are_refused_by_name(name: str, since: str, until: str, field: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as refused:
        parse(name, since, until)
    assert refused.value.field == field
    assert len(str(refused.value)) < 120
