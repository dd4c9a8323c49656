"""Times of schedules across clock changes and outages, complete objects, overlap and templates."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.cron import time_after, times_before
from traffic.batch_schedules.planner import (
    ListedObject,
    MissedRuns,
    Overlap,
    ScheduleSettings,
    check_template,
    expand,
    marker_of,
    plan_objects,
    plan_run,
    plan_times,
)

SETTINGS = ScheduleSettings()
BERLIN = "Europe/Berlin"
NOW = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(cron: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    found, at = [], time_after(cron, zone, start)
    while at <= end:
        found.append(at)
        at = time_after(cron, zone, at)
    return found


@pytest.mark.parametrize(
    ("cron", "day", "expected"),
    [
        ("30 2 * * *", "2026-03-29", ["01:00"]),  # 02:30 does not exist: it runs at 03:00, the end of the gap
        ("30 2 * * *", "2026-10-25", ["00:30"]),  # 02:30 occurs twice: it runs the first time
        ("0 * * * *", "2026-03-29", [f"{hour:02}:00" for hour in range(6)]),
        ("0 * * * *", "2026-10-25", [f"{hour:02}:00" for hour in range(6)]),
    ],
)
def test_a_clock_change_neither_loses_nor_repeats_a_time(cron: str, day: str, expected: list[str]) -> None:
    start = utc(f"{day}T00:00") - timedelta(seconds=1)
    found = times(cron, BERLIN, start, start + timedelta(hours=5, seconds=2))
    assert [f"{at:%H:%M}" for at in found] == expected
    assert next(times_before(cron, BERLIN, found[-1])) == found[-1]


@given(
    cron=st.sampled_from(["30 2 * * *", "0 * * * *", "*/20 1-3 * * *", "15 3 * * SUN", "0 0 1 * *"]),
    zone=st.sampled_from([BERLIN, "America/New_York", "Australia/Lord_Howe", "UTC"]),
    start=st.integers(0, 366 * 86_400).map(lambda seconds: utc("2026-01-01") + timedelta(seconds=seconds)),
    passes=st.lists(st.integers(1, 3 * 86_400), min_size=1, max_size=8),
)
def test_passes_at_any_times_plan_each_time_once(cron: str, zone: str, start: datetime, passes: list[int]) -> None:
    checked_until, found = start.replace(microsecond=0), list[datetime]()
    first = checked_until
    for seconds in passes:
        now = checked_until + timedelta(seconds=seconds)
        plan = plan_times(cron, zone, MissedRuns.ALL, checked_until, now, ScheduleSettings(missed_most=2000))
        assert not plan.missed
        assert plan.next_at > now
        found += plan.due
        checked_until = now
    assert found == times(cron, zone, first, checked_until)


@pytest.mark.parametrize(
    ("policy", "due", "missed"),
    [
        (MissedRuns.SKIP, ["12:00"], ["09:00", "10:00", "11:00"]),
        (MissedRuns.ONCE, ["11:00", "12:00"], ["09:00", "10:00"]),
        (MissedRuns.ALL, ["09:00", "10:00", "11:00", "12:00"], []),
    ],
)
def test_an_outage_of_some_hours(policy: MissedRuns, due: list[str], missed: list[str]) -> None:
    plan = plan_times("0 * * * *", "UTC", policy, utc("2026-11-30T08:30"), NOW, SETTINGS)
    assert [f"{at:%H:%M}" for at in plan.due] == due
    assert [f"{at:%H:%M}" for at in plan.missed] == missed
    assert plan.next_at == utc("2026-11-30T13:00")


def test_a_long_outage_has_a_bounded_plan() -> None:
    plan = plan_times("* * * * *", "UTC", MissedRuns.ALL, utc("2026-01-01T00:00"), NOW, SETTINGS)
    assert (len(plan.due), plan.missed) == (100, ())


def listed(key: str, age_s: float = 3600) -> ListedObject:
    return ListedObject(key, "e", NOW - timedelta(seconds=age_s))


def test_objects_are_complete_with_their_marker_or_after_a_quiet_time() -> None:
    objects = [listed("in/b.jsonl"), listed("in/a.jsonl", 30), listed("in/notes.txt"), listed("in/b.jsonl.done")]
    present = [each.key for each in objects]
    assert [each.key for each in plan_objects(objects, present, "", 60, NOW)] == ["in/b.jsonl"]
    assert [each.key for each in plan_objects(objects, present, "", 0, NOW)] == ["in/a.jsonl", "in/b.jsonl"]
    assert [each.key for each in plan_objects(objects, present, ".done", 60, NOW)] == ["in/b.jsonl"]
    assert plan_objects(objects, present, "_SUCCESS", 60, NOW) == []
    assert len(plan_objects(objects, [*present, "in/_SUCCESS"], "_SUCCESS", 60, NOW)) == 2
    assert marker_of("a.jsonl", "_SUCCESS") == "_SUCCESS"


def test_overlap_decides_about_the_next_run() -> None:
    assert all(plan_run(each, 0, SETTINGS).begins for each in Overlap)
    assert plan_run(Overlap.ALLOW, 1, SETTINGS).begins
    assert not plan_run(Overlap.ALLOW, SETTINGS.open_most, SETTINGS).begins
    wait, skip = plan_run(Overlap.WAIT, 1, SETTINGS), plan_run(Overlap.SKIP, 1, SETTINGS)
    assert (wait.begins, wait.is_skipped, skip.begins, skip.is_skipped) == (False, False, False, True)


def test_addresses_have_the_time_in_the_zone_of_the_schedule() -> None:
    at = utc("2026-11-30T23:30")
    assert expand("s3://b/{date}/{hour}{minute}-{name}.jsonl", at, BERLIN, "x") == "s3://b/2026-12-01/0030-x.jsonl"
    for wrong in ("s3://b/{week}", "s3://b/{date", "s3://b/}", "s3://b/{}"):
        with pytest.raises(ValueError, match=r"unknown|single brace"):
            check_template(wrong, ("date",))
