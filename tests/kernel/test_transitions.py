"""Compare-and-set: the change and its event together, or neither."""

import pytest

from kernel.models import Event, Lease
from kernel.transitions import StaleDecision, compare_and_set, compare_and_set_or_stale
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

EVENT = {"kind": "lease.moved", "message": "moved"}


@pytest.fixture
def lease() -> Lease:
    return Lease.objects.create(name="x", holder="a", acquired_at=NOW, renewed_at=NOW, expires_at=NOW)


def test_a_row_that_is_as_seen_changes_with_its_event(lease: Lease) -> None:
    assert compare_and_set(Lease.objects.filter(holder="a"), event=EVENT, now=NOW, holder="b")
    lease.refresh_from_db()
    assert lease.holder == "b"
    assert Event.objects.get().message == "moved"


def test_a_row_that_moved_on_is_left_alone_and_nothing_is_said(lease: Lease) -> None:
    assert not compare_and_set(Lease.objects.filter(holder="z"), event=EVENT, now=NOW, holder="b")
    lease.refresh_from_db()
    assert lease.holder == "a"
    assert not Event.objects.exists()


def test_a_change_nobody_needs_to_read_about_writes_no_event(lease: Lease) -> None:
    assert compare_and_set(Lease.objects.filter(name=lease.name), event=None, now=NOW, holder="b")
    assert not Event.objects.exists()


def test_as_part_of_a_larger_step_a_stale_change_raises(lease: Lease) -> None:
    with pytest.raises(StaleDecision, match="the lease"):
        compare_and_set_or_stale(Lease.objects.filter(name=lease.name, holder="z"), what="the lease", holder="b")
