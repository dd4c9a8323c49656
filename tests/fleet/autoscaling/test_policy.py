"""Policies are read back as stated, and errors name the rule. Windows of a schedule, including days of clock
changes."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fleet.autoscaling.planning.policy import (
    CellPools,
    CellRange,
    Cells,
    CloudMetric,
    InvalidScaling,
    ScalingMode,
    ScalingPolicy,
    ScheduleWindow,
    cells_as_json,
    cells_from_text,
    cells_to_text,
    dimensions_from_text,
    dimensions_to_text,
    last_began,
    parse_cells,
    parse_range,
    parse_scaling_policy,
    scaling_policy_as_json,
    window_in_force,
)

METRIC = {"namespace": "AWS/SQS", "metric": "Visible", "per_cell": 10}
WINDOW = {"cron": "0 8 * * MON-FRI", "for_s": 3600, "cells": 4}


def test_it_begins_in_shadow() -> None:
    assert parse_scaling_policy({}) == ScalingPolicy()
    assert ScalingPolicy().mode is ScalingMode.SHADOW


def test_what_is_stated_is_read_back() -> None:
    stated = {"mode": "act", "budget_per_hour": 50, "schedule": [{**WINDOW, "time_zone": "Asia/Tokyo"}]}
    policy = parse_scaling_policy(stated)
    assert parse_scaling_policy(scaling_policy_as_json(policy)) == policy
    assert parse_scaling_policy({"mode": "shadow"}, policy).schedule == policy.schedule
    assert parse_scaling_policy({"schedule": []}, policy).schedule == ()
    metric = {"namespace": "AWS/SQS", "metric": "Visible", "per_cell": 10, "dimensions": {"QueueName": "jobs"}}
    [read] = parse_scaling_policy({"metrics": [metric]}).metrics
    assert parse_scaling_policy(scaling_policy_as_json(ScalingPolicy(metrics=(read,)))).metrics == (read,)
    assert dimensions_from_text(dimensions_to_text(read.dimensions)) == read.dimensions
    assert read.key != CloudMetric("AWS/SQS", "Visible", 10).key


@pytest.mark.parametrize(
    ("stated", "field", "text"),
    [
        ({"target": 0.5}, "target", "there is no target; there are: mode, target_utilisation"),
        ({"target_utilisation": 0.9}, "target_utilisation", "a number from 0.1 to 0.8"),
        ({"mode": "on"}, "mode", "shadow or act"),
        ({"slo_burn": "fast"}, "slo_burn", "a number from 1 to 1000, or null"),
        ({"metrics": [{"namespace": "AWS/SQS", "metric": "Visible"}]}, "metrics", "a list of at most 5 metrics"),
        ({"metrics": [{**METRIC, "per_cell": 0}]}, "metrics", "a list of at most 5 metrics"),
        ({"metrics": [{**METRIC, "period_s": 90}]}, "metrics", "a list of at most 5 metrics"),
        ({"metrics": [{**METRIC, "statistic": "p100"}]}, "metrics", "a list of at most 5 metrics"),
        ({"metrics": [{**METRIC, "dimensions": {"": "a"}}]}, "metrics", "a list of at most 5 metrics"),
        ({"metrics": [METRIC] * 6}, "metrics", "a list of at most 5 metrics"),
        ({"schedule": [{"cron": "0 8 * * *"}]}, "schedule", "a list of at most 20 windows with cron, for_s, cells"),
        ({"schedule": [{**WINDOW, "until": 3}]}, "schedule", "a list of at most 20 windows"),
        ({"schedule": [WINDOW] * 21}, "schedule", "a list of at most 20 windows"),
        ({"schedule": [{**WINDOW, "cron": "0 8 * *  "}]}, "schedule.0.cron", "it must have five fields"),
        ({"schedule": [{**WINDOW, "cron": "0 0 8 * * *"}]}, "schedule.0.cron", "it must have five fields"),
        ({"schedule": [{**WINDOW, "cron": "0 25 * * *"}]}, "schedule.0.cron", "bad hour; it must have five fields"),
        ({"schedule": [WINDOW, {**WINDOW, "cron": "0 0 29 2 *"}]}, "schedule.1.cron", "must occur every year"),
        ({"schedule": [{**WINDOW, "cron": "0 0 30 2 *"}]}, "schedule.0.cron", "day-of-month"),
        ({"schedule": [{**WINDOW, "time_zone": "Mars/Olympus"}]}, "schedule.0.time_zone", "Europe/Berlin"),
        ({"schedule": [{**WINDOW, "time_zone": "../../etc/passwd"}]}, "schedule.0.time_zone", "IANA database"),
        ({"schedule": [{**WINDOW, "time_zone": "Europe"}]}, "schedule.0.time_zone", "IANA database"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(stated: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidScaling) as refused:
        parse_scaling_policy(stated)
    assert refused.value.field == field
    assert text in str(refused.value)


def test_a_range_has_two_ends() -> None:
    assert parse_range({"min": 2, "max": 8}, "cells") == CellRange(2, 8)
    assert str(CellRange(2, 8)) == "2 to 8"
    assert [CellRange(2, 8).clamped(cells) for cells in (0, 5, 9)] == [2, 5, 8]


@pytest.mark.parametrize(
    "stated",
    [
        {"min": 2},
        {"min": 3, "max": 2},
        {"min": -1, "max": 2},
        {"min": 1, "max": 1001},
        {"min": 1, "max": 2, "at": 1},
        "2-3",
    ],
)
def test_what_is_no_range_is_refused(stated: Any) -> None:
    with pytest.raises(InvalidScaling, match="an object with min and max, whole numbers"):
        parse_range(stated, "cells")


def test_a_range_may_begin_at_nothing_and_does_not_end_there() -> None:
    assert parse_range({"min": 0, "max": 3}, "cells") == CellRange(0, 3)
    with pytest.raises(InvalidScaling, match="and 1 <= max"):
        parse_range({"min": 0, "max": 0}, "cells")


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("3", 3),
        ("0", 0),
        ("2-8", CellRange(2, 8)),
        ("2 .. 8", CellRange(2, 8)),
        ("1p+3d", CellPools(1, 3)),
        ("3d + 1p + 2m", CellPools(1, 3, 2)),
        ("4m", 4),
    ],
)
def test_what_people_type_is_read_and_shown_again(text: str, cells: Cells) -> None:
    assert parse_cells(cells_from_text(text), "cells") == cells
    assert parse_cells(cells_from_text(cells_to_text(cells)), "cells") == cells
    assert parse_cells(cells_as_json(cells), "cells") == cells


@pytest.mark.parametrize("text", ["", "x", "-1", "2-", "1p+", "1p+2p", "p+d", "1p3d", "\u0663", "1" * 50])
def test_what_nobody_means_is_nothing(text: str) -> None:
    assert cells_from_text(text) is None


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"prefill": 1, "decode": 0}, "has prefill cells without decode cells, which work in pairs"),
        ({"prefill": 0, "decode": 2}, "has decode cells without prefill cells"),
        ({"prefill": 1}, "it must be an object with prefill and decode"),
        ({"prefill": 1, "decode": 1, "other": 1}, "it must be an object with prefill and decode"),
        ({"prefill": -1, "decode": 1}, "whole numbers from 0"),
        ({"prefill": 600, "decode": 600}, "the sum is at most 1000"),
        ("two", "or one with prefill and decode"),
    ],
)
def test_cells_by_role_that_make_no_sense_are_named(stated: Any, words: str) -> None:
    with pytest.raises(InvalidScaling) as refused:
        parse_cells(stated, "regions.east.cells")

    assert words in str(refused.value)


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
    """02:30 does not exist in Berlin on 29 March 2026. Debian's cron starts such a job right after."""
    night = ScheduleWindow("30 2 * * *", 3600.0, 4, "Europe/Berlin")
    assert last_began(night, at("2026-03-29T01:00:00")) == at("2026-03-29T01:00:00")
    assert window_in_force([night], "us-east-1", at("2026-03-29T01:10:00")) is night


def test_of_open_windows_the_one_that_wants_most_of_this_region_counts() -> None:
    small, large = ScheduleWindow("* * * * *", 60.0, 2), ScheduleWindow("0 0 * * *", 86_400.0, 9, region="us-west-2")
    moment = at("2026-11-26T07:00:30")
    assert window_in_force([small, large], "us-east-1", moment) is small
    assert window_in_force([small, large], "us-west-2", moment) is large
    assert window_in_force([], "us-east-1", moment) is None
