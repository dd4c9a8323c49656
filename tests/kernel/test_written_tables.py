"""Cached results equal those of the tables, for any writer and any order of commits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event as Signal

import pytest
from django.db import connection, transaction

from kernel.models import Lease
from kernel.row_cache import WrittenTables
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE_S = 60.0
LEASES, EVENTS = ["kernel_lease"], ["kernel_event"]


def lease(name: str, holder: str = "a") -> None:
    Lease.objects.create(name=name, holder=holder, acquired_at=NOW, renewed_at=NOW, expires_at=NOW)


class Reader:
    """Asks as a pass does: it looks, then takes what is there."""

    def __init__(self) -> None:
        self.tables = WrittenTables([*LEASES, *EVENTS])
        self.loads = 0

    def holders(self) -> dict[str, str]:
        self.tables.look()
        return self.tables.get("holders", LEASES, self._load)

    def _load(self) -> dict[str, str]:
        self.loads += 1
        return dict(Lease.objects.values_list("name", "holder"))


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_what_nobody_wrote_to_is_read_once(reader: Reader) -> None:
    lease("one")
    assert [reader.holders() for _ in range(5)] == [{"one": "a"}] * 5
    assert reader.loads == 2  # the first read was before the first look


def test_an_empty_table_is_known_to_be_empty(reader: Reader) -> None:
    assert [reader.holders() for _ in range(3)] == [{}] * 3
    assert reader.loads == 2


def test_every_kind_of_write_is_seen(reader: Reader) -> None:
    lease("one")
    assert reader.holders() == {"one": "a"}
    Lease.objects.filter(name="one").update(holder="b")
    assert reader.holders() == {"one": "b"}
    lease("two")
    assert reader.holders() == {"one": "b", "two": "a"}
    Lease.objects.filter(name="one").delete()
    assert reader.holders() == {"two": "a"}
    Lease.objects.filter(name="two").delete()
    lease("three")
    assert reader.holders() == {"three": "a"}


def test_a_write_to_another_table_is_no_reason_to_read(reader: Reader) -> None:
    lease("one")
    for _ in range(2):
        reader.holders()
        reader.tables.get("events", EVENTS, dict)
    Lease.objects.filter(name="one").update(holder="b")
    reader.holders()
    reader.tables.get("events", EVENTS, lambda: pytest.fail("nobody wrote an event"))


def test_nothing_stays_nothing_and_something_is_read_again(reader: Reader) -> None:
    found: list[list[int]] = [[], [1], [1], []]
    reader.tables.look()
    read = [reader.tables.get_lasting("few", LEASES, lambda: found.pop(0)) for _ in range(2)]
    assert read == [[], []]
    lease("one")
    reader.tables.look()
    assert [reader.tables.get_lasting("few", LEASES, lambda: found.pop(0)) for _ in range(4)] == [[1], [1], [], []]
    assert found == []


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    """Runs in a thread with its own connection."""
    with ThreadPoolExecutor(1) as thread:
        yield thread
        thread.submit(_close).result(DEADLINE_S)


def _close() -> None:
    connection.close()


def test_what_is_committed_late_is_seen(reader: Reader, writer: ThreadPoolExecutor) -> None:
    written, commit = Signal(), Signal()

    def write_slowly() -> None:
        with transaction.atomic():
            lease("late")
            written.set()
            assert commit.wait(DEADLINE_S)

    assert reader.holders() == {}
    writing = writer.submit(write_slowly)
    assert written.wait(DEADLINE_S)
    for number in range(3):
        lease(str(number))
        assert set(reader.holders()) == {str(each) for each in range(number + 1)}
    commit.set()
    writing.result(DEADLINE_S)
    assert set(reader.holders()) == {"0", "1", "2", "late"}


def test_what_is_taken_back_leaves_nothing(reader: Reader) -> None:
    lease("one")
    reader.holders()
    with transaction.atomic():
        Lease.objects.filter(name="one").update(holder="b")
        transaction.set_rollback(True)
    assert reader.holders() == {"one": "a"}
