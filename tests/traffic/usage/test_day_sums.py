"""Sums of days never change a figure: for random rows, queries, zones and late hours, they give what the hours give."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, transaction

from fleet.capacity.planning.rates import Source
from tests.fleet import rows
from traffic.usage.models import CellDay, CellHour, CostShare, SummedDay, UsageDay, UsageHour
from traffic.usage.planning.figures import COST_DIMENSIONS, DIMENSIONS, HOURS_KEPT, By, UsageQuery
from traffic.usage.selectors.costs import batch_price, cost_answer, cost_rows
from traffic.usage.selectors.usage import usage_answer, usage_stream
from traffic.usage.services.counting import usage_count
from traffic.usage.services.day_sums import COUNTED_AFTER, DAYS_KEPT, days_reopen, days_sum, days_trim

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
NOW = datetime(2026, 11, 26, 9, 30, tzinfo=UTC)
DAYS = 5
ZONES = [timezone(timedelta(minutes=minutes)) for minutes in (-600, -210, 0, 345, 840)]


def hour(back: int) -> datetime:
    return NOW.replace(minute=0) - timedelta(hours=back)


def add_hours(draw: random.Random, backs: list[int], rows_each: int = 4) -> None:
    for back in backs:
        for number in {draw.randrange(8) for _ in range(rows_each)}:
            account = {
                "tenant": f"tenant-{number % 3}", "key": f"{number % 2}", "deployment": f"model-{number % 2}",
                "serving_class": "batch" if number > 5 else "realtime", "hour": hour(back),
            }  # fmt: skip
            tokens = {name: draw.randrange(10**6) for name in ("prompt_tokens", "completion_tokens")}
            money = Decimal(draw.randrange(10**9)) / 10**6
            UsageHour.objects.create(**account, **tokens, adapter=f"{back}", arrived=number, charged=money)
            kind = {"version": "v@1", "region": f"region-{number % 2}", "instance_type": "t"}
            sources = {name: draw.choice(list(Source)) for name in ("cost_source", "energy_source", "carbon_source")}
            shared = {"cost": money, "energy_uj": draw.randrange(10**9), "carbon_ug": draw.randrange(10**9), **sources}
            CostShare.objects.create(**account, **kind, **tokens, **shared, adapter=f"{back}")
            machines = {"deployment": f"{account['deployment']}" if number else "", "hour": hour(back), "settled": True}
            CellHour.objects.get_or_create(
                **machines, **kind, defaults={**shared, "machine_ms": 3_600_000, "idle": money / 2, "measured_uj": 5}
            )


def random_query(draw: random.Random, dimensions: tuple[str, ...]) -> UsageQuery:
    start = NOW - timedelta(minutes=draw.choice([draw.randrange(DAYS * 1440), 1440 * draw.randrange(DAYS) + 570]))
    end = start + timedelta(minutes=draw.choice([draw.randrange(1, DAYS * 1440), 1440 * draw.randrange(1, DAYS)]))
    group = tuple(name for name in dimensions if draw.random() < 0.4)
    values = {"tenant": "tenant-1", "class": "realtime", "deployment": "model-1", "region": "region-1"}
    where = tuple((name, values[name]) for name in dimensions if name in values and draw.random() < 0.2)
    zone = draw.choice(ZONES)
    return UsageQuery(start.astimezone(zone), end.astimezone(zone), draw.choice(list(By)), group, where)


def figures(seed: int) -> list[Any]:
    """The answers to some queries."""
    draw, found = random.Random(seed), []
    for _ in range(6):
        usage, cost = random_query(draw, DIMENSIONS), random_query(draw, COST_DIMENSIONS)
        found += [usage, sorted_rows(usage_stream(usage)), usage_answer(usage, most=3).totals]
        found += [cost, cost_rows(cost), cost_answer(cost, most=3), batch_price(cost)]
    return found


def sorted_rows(usage: Any) -> list[Any]:
    return [(row.start, row.group, row.sums) for row in usage]


def by_hour(seed: int) -> list[Any]:
    """The same answers without any sums."""
    with transaction.atomic():
        SummedDay.objects.all().delete()
        found = figures(seed)
        transaction.set_rollback(True)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_sums_of_days_give_what_hours_give_also_after_a_late_hour(seed: int) -> None:
    draw = random.Random(seed)
    add_hours(draw, draw.sample(range(DAYS * 24), 40))
    assert days_sum(now=NOW) in (DAYS - 1, DAYS)
    assert days_sum(now=NOW) == 0
    assert figures(seed) == by_hour(seed)
    late = [draw.randrange(DAYS * 24, DAYS * 24 + 10), 30, 60]
    days_reopen(hour(back) for back in late)
    UsageHour.objects.filter(hour__in=[hour(back) for back in late]).delete()
    CostShare.objects.filter(hour__in=[hour(back) for back in late]).delete()
    add_hours(draw, late)
    assert figures(seed) == by_hour(seed)
    assert days_sum(now=NOW) in (2, 3)
    assert figures(seed) == by_hour(seed)


def test_sums_are_read_instead_of_hours() -> None:
    UsageHour.objects.create(tenant="rufus", hour=hour(24), requests=3)
    CellHour.objects.create(deployment="sim", instance_type="t", hour=hour(24), machine_ms=7, settled=True)
    days_sum(now=NOW)
    UsageDay.objects.update(requests=4)
    CellDay.objects.update(machine_ms=8)
    week = UsageQuery(NOW - timedelta(days=7), NOW, group=())
    assert usage_answer(week, most=1).totals["requests"] == 4
    assert cost_answer(week, most=1).totals.sums.machine_ms == 8
    assert usage_answer(replace(week, by=By.HOUR), most=1).totals["requests"] == 3
    assert cost_answer(replace(week, by=By.HOUR), most=1).totals.sums.machine_ms == 7
    assert usage_answer(replace(week, start=hour(24)), most=1).totals["requests"] == 3, "a part of the day"


def test_today_and_days_with_unsettled_hours_are_not_summed() -> None:
    midnight = NOW.replace(hour=0, minute=0)
    UsageHour.objects.create(tenant="rufus", hour=midnight - timedelta(hours=1), requests=3)
    open_hour = CellHour.objects.create(deployment="sim", instance_type="t", hour=midnight - timedelta(hours=30))
    assert days_sum(now=midnight + COUNTED_AFTER - timedelta(seconds=1)) == 0
    assert days_sum(now=midnight + COUNTED_AFTER) == 1
    CellHour.objects.filter(pk=open_hour.pk).update(settled=True)
    assert days_sum(now=NOW) == 1
    assert not SummedDay.objects.filter(day=NOW.date()).exists()


def test_a_day_keeps_its_figures_when_its_hours_expire() -> None:
    add_hours(random.Random(7), list(range(24, 60)))
    week = UsageQuery(NOW - timedelta(days=7), NOW, By.DAY, ("deployment",))
    before = sorted_rows(usage_stream(week)), cost_rows(replace(week, group=("tenant",)))
    expired = NOW + HOURS_KEPT + timedelta(days=2)
    for _ in range(2):
        days_sum(now=expired)
        days_trim(now=expired)
        assert not UsageHour.objects.exists()
        assert not CostShare.objects.exists()
        assert (sorted_rows(usage_stream(week)), cost_rows(replace(week, group=("tenant",)))) == before
    days_reopen([hour(30)])
    CellHour.objects.create(deployment="late", instance_type="t", hour=hour(30), machine_ms=11, settled=True)
    for _ in range(2):
        machines = {row.group["deployment"]: row.sums.machine_ms for row in cost_rows(replace(week, by=By.TOTAL))}
        assert machines["late"] == 11
        assert sorted_rows(usage_stream(week)) == before[0]
        days_sum(now=expired)
    days_trim(now=NOW + DAYS_KEPT + timedelta(days=3))
    assert not any(table.objects.exists() for table in (UsageDay, CellDay, CellHour))
    assert not SummedDay.objects.filter(day__lte=NOW.date()).exists()


def test_an_unsettled_day_expires_with_the_sums_of_its_accounts() -> None:
    UsageHour.objects.create(tenant="rufus", hour=hour(30), requests=3)
    CellHour.objects.create(deployment="sim", instance_type="t", hour=hour(30), machine_ms=9)
    expired = NOW + HOURS_KEPT + timedelta(days=2)
    assert days_sum(now=expired) == HOURS_KEPT.days + 2
    days_trim(now=expired)
    week = UsageQuery(NOW - timedelta(days=7), NOW, group=())
    assert usage_answer(week, most=1).totals["requests"] == 3
    CellHour.objects.update(settled=True)
    assert days_sum(now=expired) == 1
    assert usage_answer(week, most=1).totals["requests"] == 3
    assert cost_answer(week, most=1).totals.sums.machine_ms == 9


def test_each_writer_of_hours_reopens_their_days() -> None:
    rows.node("n-a")
    usage_count(now=NOW - timedelta(hours=34))
    SummedDay.objects.bulk_create(SummedDay(day=hour(back).date(), is_current=True) for back in (0, 24, 48))
    usage_count(now=NOW)
    assert not SummedDay.objects.exclude(day=hour(48).date()).filter(is_current=True).exists()
    assert not CellHour.objects.filter(settled=False, hour__lt=hour(1)).exists()
    assert SummedDay.objects.get(day=hour(48).date()).is_current


def test_changing_an_hour_excludes_summing_its_day() -> None:
    days_reopen([NOW])
    with connection.cursor() as cursor:
        cursor.execute("SELECT mode FROM pg_locks WHERE relation = 'traffic_summedday'::regclass")
        assert ("RowExclusiveLock",) in cursor.fetchall(), "conflicts with the lock of a transaction that sums"
