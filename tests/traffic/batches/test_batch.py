"""Creating batches: limits of a tenant, estimates of time, and samples of progress."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from engine_agent.protocol.load_messages import BatchLoad
from fleet.nodes.models import NodeReport
from tests.fleet.rows import NOW
from tests.traffic.rows import MODEL, begun, jsonl, line, serving_fleet, stored
from traffic.batches.models import Batch, BatchRange, BatchTimeline, StoredFile
from traffic.batches.planning.batch import BatchSettings, BatchState
from traffic.batches.selectors import batch_loads, ready_cells
from traffic.batches.services.batch import batch_move, batches_advance, batches_sample, batches_trim
from traffic.files.planner import FilePurpose
from traffic.files.services.files import file_garbage_collect, stored_files_trim
from traffic.files.services.store import file_store
from traffic.tenants.planner import ApplicationRefused

pytestmark = pytest.mark.django_db
SHORT: dict[str, Any] = {"switchyard": {"completion_window": "10m"}}


@pytest.fixture(autouse=True)
def _fleet(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    serving_fleet()


def measured(lines: int, seconds: int) -> None:
    done = begun(jsonl(line(1)))
    ended_at = NOW - timedelta(hours=1)
    Batch.objects.filter(id=done.id).update(
        state="completed",
        lines=lines,
        lines_by_model={MODEL: lines},
        completed=lines,
        in_progress_at=ended_at - timedelta(seconds=seconds),
        finalizing_at=ended_at,
        completed_at=ended_at,
    )


def test_a_deadline_that_cannot_be_met_is_refused_with_one_that_can_be() -> None:
    measured(lines=100, seconds=1000)
    with pytest.raises(ApplicationRefused, match="use a window of") as caught:
        begun(jsonl(*(line(number) for number in range(100))), **SHORT)
    assert (caught.value.code, caught.value.param) == ("deadline_infeasible", "switchyard.completion_window")
    assert begun(jsonl(line(1)), **SHORT).model == MODEL


def test_lines_that_wait_already_count() -> None:
    measured(lines=100, seconds=100)
    begun(jsonl(*(line(number) for number in range(700))))
    with pytest.raises(ApplicationRefused, match="1 lines behind 700 others"):
        begun(jsonl(line(1)), **SHORT)


def test_nothing_is_refused_where_nothing_was_measured() -> None:
    assert begun(jsonl(*(line(number) for number in range(100))), **SHORT).window == "10m"


def test_a_tenant_has_so_many_open_and_the_next_one_when_one_ends() -> None:
    few = BatchSettings(max_open_per_tenant=1)
    first = begun(jsonl(line(1)), "acme", settings=few)
    with pytest.raises(ApplicationRefused, match="1 batches are open already"):
        begun(jsonl(line(1)), "acme", settings=few)
    begun(jsonl(line(1)), "globex", settings=few)
    batch_move(
        Batch.objects.filter(id=first.id), start=BatchState.VALIDATING, to=BatchState.FAILED, now=NOW
    )  # fmt: skip
    begun(jsonl(line(1)), "acme", settings=few)


def test_a_batch_moves_only_from_the_state_that_was_seen() -> None:
    batch = Batch.objects.filter(id=begun(jsonl(line(1))).id)
    assert batch_move(batch, start=BatchState.IN_PROGRESS, to=BatchState.FINALIZING, now=NOW) == 0
    with pytest.raises(ValueError, match="does not go from"):
        batch_move(batch, start=BatchState.VALIDATING, to=BatchState.COMPLETED, now=NOW)


def test_what_has_no_time_left_is_finalized_as_expired() -> None:
    batch = begun(jsonl(line(1)))
    Batch.objects.filter(id=batch.id).update(state="in_progress", expires_at=NOW)
    batch.ranges.create(number=0, start=0, end=1, lines=1)
    assert batches_advance(now=NOW - timedelta(seconds=1)) == 0
    assert batches_advance(now=NOW) == 1
    batch.refresh_from_db()
    assert (batch.state, batch.expired) == ("finalizing", True)


def test_what_has_expired_is_forgotten_with_its_bytes() -> None:
    gone = stored(jsonl(line(1)), expires_at=NOW)
    kept = stored(jsonl(line(1)), purpose=FilePurpose.BATCH_OUTPUT)
    old = begun(jsonl(line(1)))
    Batch.objects.filter(id=old.id).update(state="completed", expires_at=NOW - timedelta(days=31))
    assert (stored_files_trim(now=NOW), batches_trim(now=NOW)) == (1, 1)
    assert not StoredFile.objects.filter(id=gone.id).exists()
    assert f"files/{gone.id}" not in dict(file_store().names("files"))
    assert f"files/{kept.id}" in dict(file_store().names("files"))


def test_folders_of_batches_that_are_not_open_are_deleted_after_a_day() -> None:
    store, batch = file_store(), begun(jsonl(line(1)))
    for name in (f"batches/{batch.id}", "batches/batch-gone"):
        writer = store.write(f"{name}/piece")
        writer.write(b"x")
        writer.commit()
    file_garbage_collect(now=timezone.now())
    assert len(list(store.names("batches"))) == 2
    tomorrow = timezone.now() + timedelta(days=1)
    file_garbage_collect(now=tomorrow)
    assert [name for name, _ in store.names("batches")] == [f"batches/{batch.id}"]
    Batch.objects.filter(id=batch.id).update(state="completed")
    file_garbage_collect(now=tomorrow)
    assert list(store.names("batches")) == []


def test_bytes_without_a_row_are_deleted_after_a_day() -> None:
    store = file_store()
    lost = store.write("files/file-" + "0" * 32)
    lost.write(b"x")
    lost.commit()
    begun_only = store.write("files/other")
    begun_only.write(b"x")
    file_garbage_collect(now=timezone.now())
    assert len(dict(store.names("files"))) == 1
    file_garbage_collect(now=timezone.now() + timedelta(days=2))
    assert (dict(store.names("files")), list(store.names("unfinished"))) == ({}, [])
    begun_only.abort()


def test_what_leaders_report_of_batch_work_is_heard_while_it_is_fresh() -> None:
    assert ready_cells("us-east-1", MODEL) == ["c1"]
    load = {"classes": {"realtime": {"ttft_p50_ms": 120.0}}, "batch": {"running": 3, "window": 12}}
    NodeReport.objects.filter(node__member__cell="c1").update(cell="c1", load=load, last_seen_at=NOW)
    assert batch_loads(["c1", "gone"], NOW) == [BatchLoad(running=3, window=12), None]
    assert batch_loads(["c1"], NOW + timedelta(minutes=1)) == [None]
    NodeReport.objects.filter(node__member__cell="c1").update(cell="another")
    assert batch_loads(["c1"], NOW) == [None]


def running(lines: int = 1000) -> Batch:
    batch = begun(jsonl(line(1)), "acme")
    Batch.objects.filter(id=batch.id).update(state="in_progress", in_progress_at=NOW, lines=lines)
    batch.ranges.create(number=0, start=0, end=1, lines=lines)
    return batch


def look(batch: Batch, second: float, completed: int, failed: int = 0) -> int:
    BatchRange.objects.filter(batch=batch).update(completed=completed, failed=failed)
    return batches_sample(now=NOW + timedelta(seconds=second))


def test_a_batch_has_one_row_that_grows_by_a_sample_a_step() -> None:
    batch = running()
    assert [look(batch, second, done, 1) for second, done in ((0, 0), (10, 4), (30, 9), (95, 20))] == [1, 0, 1, 1]
    row = BatchTimeline.objects.get()
    assert (row.completed, row.failed) == ([0, 9, None, 20], [1, 1, None, 1])


def test_batches_that_do_not_run_are_not_looked_at() -> None:
    batch = running()
    Batch.objects.update(state="finalizing")
    assert look(batch, 0, 1) == 0
    assert not BatchTimeline.objects.exists()


def test_many_batches_take_as_many_queries_as_one() -> None:
    batches = [running() for _ in range(3)]
    with CaptureQueriesContext(connection) as seen:
        assert batches_sample(now=NOW) == len(batches)
    assert len(seen) == 4


def test_its_samples_go_with_the_batch() -> None:
    batch = running()
    look(batch, 0, 1)
    batch.delete()
    assert not BatchTimeline.objects.exists()
