"""Usage in a bucket of the cloud of tests: a day is there once it is over, whole, in two forms, and never replaced."""

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
from arro3.io import read_parquet
from django.db import transaction

from fleet.clouds.aws import calls
from fleet.clouds.aws.calls import Unanswered
from lab.cloud.server import World, serve
from traffic.usage.models import CellHour, CostShare, UsageExport, UsageHour
from traffic.usage.services.export import usage_export_days

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

TARGET = "s3://bills/usage/fleet-1"
DAY = datetime(2026, 11, 20, tzinfo=UTC)
AFTER = DAY + timedelta(days=1, minutes=11)
CSV, PARQUET = "usage/fleet-1/usage-2026-11-20.csv", "usage/fleet-1/usage-2026-11-20.parquet"
COSTS, TYPED_COSTS = "usage/fleet-1/costs-2026-11-20.csv", "usage/fleet-1/costs-2026-11-20.parquet"


@pytest.fixture
def s3(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    world = World()
    with serve(world):
        clients = cache(world.client)
        monkeypatch.setattr(calls, "client", lambda service, region, once: clients(service, region))
        client = clients("s3", "us-east-1")
        client.create_bucket(Bucket="bills")
        yield client
        for key in keys(client):
            client.delete_object(Bucket="bills", Key=key)
        client.delete_bucket(Bucket="bills")  # its name is one of all accounts, and of the next test
    assert world.bugs == []


def used(hour: datetime, **columns: Any) -> None:
    UsageHour.objects.create(tenant="rufus", key="0a0a", deployment="sim", hour=hour, **columns)


def keys(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket="bills").get("Contents", [])]


def read(s3: Any, key: str) -> bytes:
    return bytes(s3.get_object(Bucket="bills", Key=key)["Body"].read())


def test_a_day_is_written_once_it_is_over_with_every_hour_in_both_forms(s3: Any) -> None:
    used(DAY + timedelta(hours=3), requests=2, charged=Decimal("0.25"))
    used(DAY + timedelta(hours=23), requests=5)
    used(DAY + timedelta(hours=24), requests=100)
    assert usage_export_days(target=TARGET, now=DAY + timedelta(days=1, minutes=9)) == []
    assert len(usage_export_days(target=TARGET, now=AFTER)) == 4
    assert keys(s3) == [COSTS, TYPED_COSTS, CSV, PARQUET]
    rows = list(csv.DictReader(io.StringIO(read(s3, CSV).decode(), newline="")))
    assert [(row["start"], row["key"], row["requests"]) for row in rows] == [
        ("2026-11-20T23:00:00Z", "0a0a", "5"), ("2026-11-20T03:00:00Z", "0a0a", "2"),
    ]  # fmt: skip
    typed = read_parquet(io.BytesIO(read(s3, PARQUET))).read_all().to_struct_array().to_pylist()
    assert [(row["requests"], row["charged_usd"]) for row in typed] == [(5, Decimal(0)), (2, Decimal("0.25"))]
    assert usage_export_days(target=TARGET, now=AFTER) == []


def test_an_answer_that_was_lost_is_found_and_nothing_is_written_twice(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(DAY, requests=2)
    sent = calls.call

    def lost(service: str, operation: str, region: str, **params: Any) -> Any:
        answer = sent(service, operation, region, **params)
        if operation == "PutObject":
            raise Unanswered("", "the connection broke")
        return answer

    monkeypatch.setattr(calls, "call", lost)
    assert usage_export_days(target=TARGET, now=AFTER) == []
    assert (keys(s3), UsageExport.objects.count()) == ([CSV], 0)
    monkeypatch.setattr(calls, "call", sent)
    assert len(usage_export_days(target=TARGET, now=AFTER)) == 4
    assert UsageExport.objects.count() == 4


def test_what_is_there_with_other_content_is_not_replaced_and_named(s3: Any, caplog: pytest.LogCaptureFixture) -> None:
    used(DAY, requests=2)
    s3.put_object(Bucket="bills", Key=CSV, Body=b"a bill that was sent")
    usage_export_days(target=TARGET, now=AFTER)
    assert read(s3, CSV) == b"a bill that was sent"
    assert f"s3://bills/{CSV} exists with other content" in caplog.text
    assert not UsageExport.objects.exists()


def test_a_bucket_that_is_not_there_is_named_and_the_days_are_written_later(
    s3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    used(DAY, requests=2)
    assert usage_export_days(target="s3://nowhere", now=AFTER) == []
    assert "cannot export usage to s3://nowhere" in caplog.text
    assert len(usage_export_days(target=TARGET, now=AFTER + timedelta(days=30))) == 4


def test_costs_of_a_day_are_written_by_machines_with_their_idle_time_once_all_of_it_is_split(s3: Any) -> None:
    kind = {"deployment": "sim", "version": "sim@1", "region": "east", "instance_type": "p5"}
    CellHour.objects.create(**kind, hour=DAY, cost=Decimal(6), idle=Decimal("2.5"), settled=True)
    CostShare.objects.create(**kind, hour=DAY, tenant="rufus", completion_tokens=500_000, cost=Decimal("3.5"))
    last = CellHour.objects.create(**kind, hour=DAY + timedelta(hours=23))
    assert usage_export_days(target=TARGET, now=AFTER) == []
    CellHour.objects.filter(pk=last.pk).update(settled=True)
    assert len(usage_export_days(target=TARGET, now=AFTER)) == 4
    rows = list(csv.DictReader(io.StringIO(read(s3, COSTS).decode(), newline="")))
    assert [(row["start"], row["cost_usd"], row["idle_cost_usd"], row["usd_per_mtoken"]) for row in rows] == [
        ("2026-11-20T23:00:00Z", "0.000000", "0.000000", ""),
        ("2026-11-20T00:00:00Z", "3.500000", "2.500000", "7.000000"),
    ]  # fmt: skip
    typed = read_parquet(io.BytesIO(read(s3, TYPED_COSTS))).read_all().to_struct_array().to_pylist()
    assert [row["usd_per_mtoken_with_idle"] for row in typed] == [None, Decimal(12)]


@pytest.mark.parametrize("target", ["/tmp", "s3://", "https://bills", "s3://bills/a?b"])
def test_a_place_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="use s3://bucket/prefix"):
        usage_export_days(target=target, now=AFTER)


@pytest.mark.django_db(transaction=True)
def test_a_bucket_is_never_called_inside_a_transaction(s3: Any) -> None:
    used(DAY, requests=2)
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside of a transaction"):
        usage_export_days(target=TARGET, now=AFTER)
