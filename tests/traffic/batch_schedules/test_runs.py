"""Runs of schedules: one batch per time and object, overlap, refusals, pauses, and prefixes of the test cloud."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from lab.cloud.server import World
from lab.cloud.world import Fault
from tests.fleet.rows import NOW
from tests.traffic.bucket_store import cloud_of_files, lost_answer
from tests.traffic.rows import jsonl, line, serving_fleet, stored
from traffic.batch_schedules.models import BatchRun, BatchSchedule
from traffic.batch_schedules.planner import ScheduleSettings
from traffic.batch_schedules.services.runs import schedules_run
from traffic.batch_schedules.services.schedules import (
    batch_schedule_change,
    batch_schedule_create,
    batch_schedule_delete,
    batch_schedule_run,
)
from traffic.batches.models import Batch
from traffic.keys.models import ApplicationKey
from traffic.keys.services import key_revoke
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.services import tenant_grant_create, tenant_grant_withdraw

KEY = "0a1b2c3d"
MINUTE = timedelta(minutes=1)
IN = "s3://acme-data/in"


@pytest.fixture(autouse=True)
def _fleet(db: None, settings: Any, tmp_path: Path) -> None:
    settings.PLAIN_LINKS = True
    settings.FILES = str(tmp_path / "files")
    serving_fleet()
    ApplicationKey.objects.create(
        prefix=KEY, digest="d", name="search", tenant="acme", created_by="ada", created_at=NOW
    )


def by_time(**columns: Any) -> BatchSchedule:
    file = stored(jsonl(line(1)), "acme")
    stated = {"cron": "* * * * *", "input": file.id, **columns}
    return batch_schedule_create(name="nightly", key=KEY, actor="ada", now=NOW, **stated)


def granted(*uses: GrantUse, uri: str = "s3://acme-data") -> list[int]:
    rows = [tenant_grant_create(tenant="acme", use=use, target=uri, actor="ada", now=NOW) for use in uses]
    return [row.pk for row in rows]


def states() -> list[str]:
    return list(BatchRun.objects.order_by("due_at", "uri", "id").values_list("state", flat=True))


def end_batches() -> None:
    Batch.objects.update(state="completed")


def test_each_time_has_one_batch_however_often_it_is_looked_at() -> None:
    by_time()
    assert schedules_run(now=NOW + timedelta(seconds=50)) == 0
    for _ in range(3):
        schedules_run(now=NOW + MINUTE)
    (batch,) = Batch.objects.all()
    assert (batch.tenant, batch.key, batch.metadata["schedule"]) == ("acme", KEY, "nightly")
    row = BatchSchedule.objects.get()
    assert (states(), row.next_at) == (["started"], NOW + 2 * MINUTE)


def test_a_run_waits_for_the_batch_before_it() -> None:
    by_time()
    schedules_run(now=NOW + MINUTE)
    schedules_run(now=NOW + 2 * MINUTE)
    assert (states(), Batch.objects.count()) == (["started", "waiting"], 1)
    end_batches()
    schedules_run(now=NOW + 2 * MINUTE)
    assert (states(), Batch.objects.count()) == (["started", "started"], 2)


def test_a_run_is_skipped_or_begins_beside_the_batch_before_it() -> None:
    by_time(overlap="skip")
    schedules_run(now=NOW + MINUTE)
    schedules_run(now=NOW + 2 * MINUTE)
    assert states() == ["started", "skipped"]
    batch_schedule_change(name="nightly", actor="ada", now=NOW + 2 * MINUTE, overlap="allow")
    schedules_run(now=NOW + 3 * MINUTE)
    assert states() == ["started", "skipped", "started"]


def test_times_that_nobody_ran_are_recorded_and_an_event_names_them() -> None:
    by_time(cron="0 * * * *")
    schedules_run(now=NOW + timedelta(hours=3, minutes=30))
    assert states() == ["missed", "missed", "started"]
    assert "2 times were missed" in Event.objects.get(kind="batch_schedule.missed").message


def test_a_pause_has_no_runs_and_a_request_makes_one() -> None:
    by_time()
    batch_schedule_change(name="nightly", actor="ada", now=NOW, paused=True)
    assert schedules_run(now=NOW + 5 * MINUTE) == 0
    with pytest.raises(Conflict, match="paused"):
        batch_schedule_run(name="nightly", actor="ada", now=NOW)
    batch_schedule_change(name="nightly", actor="ada", now=NOW + 6 * MINUTE, paused=False)
    schedules_run(now=NOW + 6 * MINUTE)
    assert states() == []
    batch_schedule_run(name="nightly", actor="ada", now=NOW + 6 * MINUTE)
    assert schedules_run(now=NOW + 6 * MINUTE) == 1
    kinds = list(Event.objects.filter(kind__startswith="batch_schedule").order_by("id").values_list("kind", flat=True))
    assert [kind.partition(".")[2] for kind in kinds] == ["created", "paused", "resumed", "requested"]


def test_a_run_of_a_revoked_key_waits_and_one_without_its_file_fails() -> None:
    row = by_time()
    key_revoke(prefix=KEY, actor="ada", now=NOW)
    schedules_run(now=NOW + MINUTE)
    row.refresh_from_db()
    assert (states(), "revoked" in row.problem) == (["waiting"], True)
    ApplicationKey.objects.update(revoked_at=None)
    BatchSchedule.objects.update(input=f"file-{'0' * 32}")
    schedules_run(now=NOW + MINUTE)
    assert states() == ["failed"]
    assert Event.objects.filter(kind="batch_schedule.failed").count() == 1


def test_deleting_a_schedule_leaves_its_batches() -> None:
    by_time()
    schedules_run(now=NOW + MINUTE)
    batch_schedule_delete(name="nightly", actor="ada", now=NOW)
    assert (BatchRun.objects.count(), Batch.objects.count()) == (0, 1)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"cron": ""}, "cron"),
        ({"prefix": IN}, "cron"),
        ({"cron": "0 0 31 2 *"}, "cron"),
        ({"cron": "* * * *"}, "cron"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"input": ""}, "input"),
        ({"input": "file-1"}, "input"),
        ({"input": "s3://acme-data/in/{week}.jsonl"}, "input"),
        ({"input": "s3://globex-data/in/a.jsonl"}, "input"),
        ({"output_uri": "s3://acme-data/in"}, "output_uri"),
        ({"window": "9d"}, "window"),
        ({"priority": 10}, "priority"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"overlap": "maybe"}, "overlap"),
        ({"cron": "", "input": "", "prefix": IN, "overlap": "skip"}, "overlap"),
        ({"cron": "", "prefix": IN}, "input"),
        ({"cron": "", "input": "", "prefix": IN, "output_uri": f"{IN}/out"}, "output_uri"),
        ({"cron": "", "input": "", "prefix": IN, "marker": "a/b"}, "marker"),
    ],
)
def test_a_schedule_that_could_not_run_is_refused(columns: dict[str, Any], field: str) -> None:
    granted(GrantUse.READ)
    if field == "output_uri" and "prefix" in columns:
        granted(GrantUse.WRITE)
    with pytest.raises(InvalidInput) as caught:
        by_time(**columns)
    assert caught.value.field == field
    assert not BatchSchedule.objects.exists()


def test_a_name_is_used_once_and_a_key_must_be_active() -> None:
    by_time()
    with pytest.raises(Conflict, match="already"):
        by_time()
    key_revoke(prefix=KEY, actor="ada", now=NOW)
    with pytest.raises(InvalidInput, match="revoked"):
        batch_schedule_create(name="other", key=KEY, actor="ada", now=NOW, cron="* * * * *", input="file-1")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with cloud_of_files(monkeypatch, "acme-data") as world:
        yield world


def put(world: World, key: str, body: bytes = b"x") -> None:
    world.client("s3").put_object(Bucket="acme-data", Key=key, Body=body)


def watching(now: datetime, **columns: Any) -> BatchSchedule:
    granted(GrantUse.READ)
    stated = {"prefix": IN, "quiet_s": 0, "overlap": "allow", **columns}
    return batch_schedule_create(name="inbox", key=KEY, actor="ada", now=now, **stated)


def uris() -> list[str]:
    return list(Batch.objects.order_by("input_uri").values_list("input_uri", flat=True))


@pytest.mark.cloud
@pytest.mark.django_db(transaction=True)
def test_each_object_in_a_version_has_one_batch(world: World) -> None:
    now = timezone.now() + timedelta(seconds=5)
    watching(now)
    for key in ("in/a.jsonl", "in/b.jsonl", "in/notes.txt", "in2/c.jsonl"):
        put(world, key)
    world.faults.append(lost_answer("ListObjectsV2"))
    schedules_run(now=now)
    assert uris() == [], "the answer was lost"
    for passed in (31, 62, 93):
        schedules_run(now=now + timedelta(seconds=passed))
    assert uris() == [f"{IN}/a.jsonl", f"{IN}/b.jsonl"]
    batch = Batch.objects.get(input_uri=f"{IN}/a.jsonl")
    assert batch.input_etag == world.client("s3").head_object(Bucket="acme-data", Key="in/a.jsonl")["ETag"].strip('"')
    put(world, "in/a.jsonl", b"another version")
    schedules_run(now=now + timedelta(seconds=124))
    assert uris() == [f"{IN}/a.jsonl", f"{IN}/a.jsonl", f"{IN}/b.jsonl"]


@pytest.mark.cloud
@pytest.mark.django_db(transaction=True)
def test_a_listing_is_bounded_and_the_next_one_continues_also_with_markers(
    world: World,
) -> None:
    now = timezone.now() + timedelta(seconds=5)
    row = watching(now, marker="_SUCCESS")
    for number in range(5):
        put(world, f"in/{number}/a.jsonl")
        put(world, f"in/{number}/_SUCCESS")
    put(world, "in/9/unfinished.jsonl")
    small = ScheduleSettings(list_pages=1, page_objects=3)
    schedules_run(now=now, settings=small)
    row.refresh_from_db()
    assert (uris(), row.cursor) == ([f"{IN}/0/a.jsonl"], "in/1/_SUCCESS")
    for passed in range(31, 200, 31):
        schedules_run(now=now + timedelta(seconds=passed), settings=small)
    assert uris() == [f"{IN}/{number}/a.jsonl" for number in range(5)]
    row.refresh_from_db()
    assert row.problem == ""


@pytest.mark.cloud
@pytest.mark.django_db(transaction=True)
def test_a_prefix_that_cannot_be_listed_says_why_and_is_listed_again(world: World) -> None:
    now = timezone.now() + timedelta(seconds=5)
    row = watching(now)
    put(world, "in/a.jsonl")
    world.faults.append(Fault("ListObjectsV2", "AccessDenied"))
    schedules_run(now=now)
    row.refresh_from_db()
    assert "access is denied" in row.problem
    schedules_run(now=now + timedelta(seconds=31))
    row.refresh_from_db()
    assert (uris(), row.problem) == ([f"{IN}/a.jsonl"], "")
    put(world, "in/b.jsonl")
    tenant_grant_withdraw(grant_id=TenantGrant.objects.get().pk, actor="ada", now=NOW)
    schedules_run(now=now + timedelta(seconds=62))
    row.refresh_from_db()
    assert ("no grant" in row.problem, len(uris())) == (True, 1)
