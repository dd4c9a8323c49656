"""A table's rows in memory stay those of the table, whoever changes it and whenever that is committed."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event as Signal

import pytest
from django.db import connection, transaction

from kernel.models import Lease
from kernel.row_cache import RowCache
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE_S = 60.0


def lease(name: str, holder: str = "a") -> None:
    Lease.objects.create(name=name, holder=holder, acquired_at=NOW, renewed_at=NOW, expires_at=NOW)


@pytest.fixture
def known() -> RowCache:
    return RowCache("kernel_lease", ("name", "holder"), kept="holder <> 'nobody'")


def test_only_what_has_changed_is_told_with_what_it_was(known: RowCache) -> None:
    for name in ("one", "two", "three"):
        lease(name)
    assert known.refresh() == {"one": None, "two": None, "three": None}
    Lease.objects.filter(name="two").update(holder="b")
    Lease.objects.filter(name="three").delete()
    lease("four")
    assert known.refresh() == {"two": ("a",), "three": ("a",), "four": None}
    assert known.rows == {"one": ("a",), "two": ("b",), "four": ("a",)}
    assert known.refresh() == {}


def test_a_row_that_counts_no_more_is_gone(known: RowCache) -> None:
    lease("one")
    lease("idle", "nobody")
    assert known.refresh() == {"one": None}
    Lease.objects.filter(name="one").update(holder="nobody")
    assert known.refresh() == {"one": ("a",)}
    assert known.rows == {}


def _close() -> None:
    connection.close()


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    """A thread with a connection of its own."""
    with ThreadPoolExecutor(1) as thread:
        yield thread
        thread.submit(_close).result(DEADLINE_S)


def test_a_change_that_was_begun_before_a_look_and_committed_after_it_is_found(
    known: RowCache, writer: ThreadPoolExecutor
) -> None:
    lease("one")
    written, looked = Signal(), Signal()

    def write_slowly() -> None:
        with transaction.atomic():
            Lease.objects.filter(name="one").update(holder="late")
            written.set()
            assert looked.wait(DEADLINE_S)

    slow: Future[None] = writer.submit(write_slowly)
    assert written.wait(DEADLINE_S)
    for number in range(3):  # transactions that begin later and end earlier
        lease(f"quick-{number}")
        known.refresh()
    looked.set()
    slow.result(DEADLINE_S)
    assert known.refresh() == {"one": ("a",)}
    assert known.rows["one"] == ("late",)
