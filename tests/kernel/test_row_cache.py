"""Cached rows equal those of the table, for any writer and any order of commits."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event as Signal

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from kernel.models import Lease, LoopPass
from kernel.row_cache import RowCache, RowCaches, SharedRead
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
    """Runs in a thread with its own connection."""
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


def passed(loop: str, holder: str = "a") -> None:
    LoopPass.objects.update_or_create(loop=loop, defaults={"holder": holder, "passed_at": NOW})


class Pair:
    """Two tables, and how many queries a look at them takes."""

    def __init__(self, known: RowCache) -> None:
        self.leases, self.loops = known, RowCache("kernel_looppass", ("loop", "holder"))
        self._both = RowCaches(self.leases, self.loops)

    def look(self) -> tuple[list[dict[str, object]], int]:
        with CaptureQueriesContext(connection) as asked:
            changed = self._both.refresh()
        return [dict(each) for each in changed], len(asked)


@pytest.fixture
def pair(known: RowCache) -> Pair:
    LoopPass.objects.all().delete()
    lease("one")
    passed("first")
    made = Pair(known)
    assert made.look() == ([{"one": None}, {"first": None}], 2)
    return made


def test_one_query_tells_that_nothing_has_changed_in_any_of_several_tables(pair: Pair) -> None:
    assert [pair.look() for _ in range(3)] == [([{}, {}], 1)] * 3


def test_the_tables_that_have_not_changed_are_not_read_but_all_after_one_that_has(pair: Pair) -> None:
    passed("first", "b")
    assert pair.look() == ([{}, {"first": ("a",)}], 2)
    Lease.objects.filter(name="one").update(holder="b")
    assert pair.look() == ([{"one": ("a",)}, {}], 3)
    Lease.objects.all().delete()
    changed, _ = pair.look()
    assert changed == [{"one": ("b",)}, {}]
    LoopPass.objects.all().delete()
    assert pair.look()[0] == [{}, {"first": ("b",)}]
    assert (pair.leases.rows, pair.loops.rows) == ({}, {})


def test_a_row_that_counts_no_more_is_gone_from_one_of_several(pair: Pair) -> None:
    Lease.objects.filter(name="one").update(holder="nobody")
    assert pair.look()[0] == [{"one": ("a",)}, {}]
    lease("another", "nobody")
    assert pair.look()[0] == [{}, {}]


def test_what_was_forgotten_is_read_whole(pair: Pair) -> None:
    pair.loops.forget()
    assert pair.look() == ([{}, {}], 2)
    assert pair.look() == ([{}, {}], 1)


def test_a_change_that_is_committed_after_a_look_at_several_is_found(pair: Pair, writer: ThreadPoolExecutor) -> None:
    written, looked = Signal(), Signal()

    def write_slowly() -> None:
        with transaction.atomic():
            Lease.objects.filter(name="one").update(holder="late")
            written.set()
            assert looked.wait(DEADLINE_S)

    slow: Future[None] = writer.submit(write_slowly)
    assert written.wait(DEADLINE_S)
    for number in range(3):  # transactions that begin later and end earlier
        passed(f"quick-{number}")
        pair.look()
    assert pair.look()[0] == [{}, {}]
    looked.set()
    slow.result(DEADLINE_S)
    assert pair.look()[0][0] == {"one": ("a",)}


def test_a_shared_value_is_read_again_after_a_write_or_with_another_key(writer: ThreadPoolExecutor) -> None:
    shared: SharedRead[list[str]] = SharedRead("kernel_lease", "kernel_looppass")
    reads = []

    def names() -> list[str]:
        reads.append("")
        return list(Lease.objects.order_by("name").values_list("name", flat=True))

    assert shared.get(1, names) == []
    assert shared.get(1, names) is shared.get(1, names)
    writer.submit(lease, "one").result(DEADLINE_S)
    assert shared.get(1, names) == ["one"]
    assert writer.submit(shared.get, 1, names).result(DEADLINE_S) is shared.get(1, names)
    Lease.objects.all().delete()
    assert shared.get(1, names) == []
    assert len(reads) == 3
    shared.get(2, names)
    assert len(reads) == 4


def test_a_shared_value_never_misses_a_transaction_that_ends_late(writer: ThreadPoolExecutor) -> None:
    shared: SharedRead[int] = SharedRead("kernel_lease")
    begun, may_end = Signal(), Signal()

    def slow() -> None:
        with transaction.atomic():
            lease("slow")
            begun.set()
            may_end.wait(DEADLINE_S)

    writing = writer.submit(slow)
    begun.wait(DEADLINE_S)
    lease("fast")
    assert shared.get(None, Lease.objects.count) == 1
    may_end.set()
    writing.result(DEADLINE_S)
    assert shared.get(None, Lease.objects.count) == 2
