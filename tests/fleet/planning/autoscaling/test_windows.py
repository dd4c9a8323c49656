"""When windows of a schedule are open, on the days on which clocks change, too."""

from datetime import UTC, datetime

import pytest

from fleet.planning.autoscaling.windows import ScheduleWindow, last_began, window_in_force

BERLIN = ScheduleWindow("0 8 * * MON-FRI", 3600.0, 4, "Europe/Berlin")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "is_open"),
    [
        ("2026-11-26T06:59:59", False),
        ("2026-11-26T07:00:00", True),
        ("2026-11-26T07:59:59", True),
        ("2026-11-26T08:00:00", False),
        ("2026-11-28T07:30:00", False),
        ("2026-07-27T06:30:00", True),
        ("2026-07-27T07:30:00", False),
    ],
)
def test_a_window_opens_in_its_time_zone(moment: str, is_open: bool) -> None:
    assert (window_in_force([BERLIN], "us-east-1", at(moment)) is not None) == is_open


def test_an_hour_that_the_clock_leaves_out_still_has_its_window() -> None:
    """On 29 March 2026 it is never 02:30 in Berlin: Debian's cron begins such a job right after."""
    night = ScheduleWindow("30 2 * * *", 3600.0, 4, "Europe/Berlin")
    assert last_began(night, at("2026-03-29T01:00:00")) == at("2026-03-29T01:00:00")
    assert window_in_force([night], "us-east-1", at("2026-03-29T01:10:00")) is night


def test_of_open_windows_the_one_that_wants_most_of_this_region_counts() -> None:
    small, large = ScheduleWindow("* * * * *", 60.0, 2), ScheduleWindow("0 0 * * *", 86_400.0, 9, region="us-west-2")
    moment = at("2026-11-26T07:00:30")
    assert window_in_force([small, large], "us-east-1", moment) is small
    assert window_in_force([small, large], "us-west-2", moment) is large
    assert window_in_force([], "us-east-1", moment) is None
