"""Samples of open batches in PostgreSQL: one row each, once a step, gone with the batch."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.fleet.rows import NOW
from tests.traffic.async_rows import serving_fleet
from tests.traffic.batch_rows import begun, jsonl, line
from traffic.models import Batch, BatchRange, BatchTimeline
from traffic.services.batch_pacing import batches_sample

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _own_store(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    serving_fleet()


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
