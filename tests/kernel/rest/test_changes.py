"""Changes since a revision: all are listed, however transactions overlap, and rolled-back ones are not listed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection

from controlplane.api.change_feed import kinds_changed
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment
from fleet.regions.models import Region
from kernel import clock
from kernel.rest.changes import BEGINNING, RevisionGone, changes_since, changes_trim, is_revision, revision_now
from tests.fleet import rows

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def another_session() -> Iterator[Any]:
    """A separate connection whose transaction stays open until it is committed or rolled back."""
    known = connection.get_connection_params()
    names = ("dbname", "user", "password", "host", "port")
    with psycopg.connect(**{name: known[name] for name in names if known.get(name)}) as session:
        yield session


def write(session: Any, name: str) -> None:
    session.execute(
        "INSERT INTO fleet_region"
        " (name, provider, position, ingress_url, spares, plain_http, cheapest_first, grpc, alarms)"
        " VALUES (%s, 'local', 0, '', '{}', 'serve', false, false, '[]')",
        [name],
    )


def changed(revision: str) -> set[str]:
    return set(changes_since("region", revision).things)


def test_a_change_is_told_once() -> None:
    before = revision_now()
    rows.region("us-east-1")
    found = changes_since("region", before)
    assert found.things == {"us-east-1": "us-east-1"}
    assert changes_since("region", found.revision).things == {}


def test_what_was_begun_before_and_committed_after_the_reader_looked_is_not_missed() -> None:
    """A sequence would lose `early` here: its number is below that of `late`, which the reader has seen."""
    with another_session() as slow:
        write(slow, "early")
        start = revision_now()
        rows.region("late")
        between = changes_since("region", start)
        assert set(between.things) == {"late"}
        slow.commit()
    assert changed(between.revision) == {"early"}


def test_an_open_transaction_holds_nobody_up() -> None:
    with another_session() as slow:
        write(slow, "slow")
        start = revision_now()
        rows.region("quick")
        assert changed(start) == {"quick"}


def test_what_was_rolled_back_never_was() -> None:
    start = revision_now()
    with another_session() as other:
        write(other, "nothing")
        other.rollback()
    assert changed(start) == set()


def test_ends_are_told_too() -> None:
    region = rows.region("us-east-1")
    start = revision_now()
    region.delete()
    assert changed(start) == {"us-east-1"}


def test_an_update_that_changes_nothing_is_no_change() -> None:
    rows.region("us-east-1")
    start = revision_now()
    Region.objects.update(provider="local")
    assert changed(start) == set()


def test_a_cell_that_gets_a_node_changes_both() -> None:
    cell, node = rows.cell("c-1"), rows.node("n-00000001")
    start = revision_now()
    CellMember.objects.create(cell=cell, node=node, rank=0)
    assert set(changes_since("cell", start).things) == {"c-1"}
    assert set(changes_since("node", start).things) == {"n-00000001"}


@pytest.mark.parametrize("column", [{"markets": ["spot"]}, {"slo": {"ttft_ms": 900}}])
def test_what_a_person_changes_of_a_deployment_is_noted(column: dict[str, Any]) -> None:
    rows.deployment()
    start = revision_now()
    Deployment.objects.update(**column)
    assert list(changes_since("deployment", start).things) == ["sim-70b"]


def test_no_migration_has_taken_a_trigger_away() -> None:
    """PostgreSQL drops one silently with a column that its condition names."""
    inserts, deletes, updates = 4, 8, 16  # bits of pg_trigger.tgtype
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT proname, coalesce(bit_or(tgtype::int), 0) FROM pg_proc "
            "LEFT JOIN pg_trigger ON tgfoid = pg_proc.oid WHERE starts_with(proname, 'note_') GROUP BY proname"
        )
        noted = dict(cursor.fetchall())
    assert noted["note_fleet_deployment_deployment"] & updates
    assert [name for name, on in noted.items() if not on & inserts or (on & deletes and not on & updates)] == []


def test_numbering_cells_is_no_change_of_a_deployment() -> None:
    rows.deployment()
    start = revision_now()
    Deployment.objects.update(next_ordinal=7)
    assert changes_since("deployment", start).things == {}


def test_bulk_writes_are_seen() -> None:
    rows.cell("c-1")
    rows.cell("c-2")
    start = revision_now()
    Cell.objects.update(reason="all at once")
    assert set(changes_since("cell", start).things) == {"c-1", "c-2"}


def test_who_asks_for_what_is_forgotten_must_begin_again() -> None:
    start = revision_now()
    rows.region("us-east-1")
    changes_trim(clock.now() + timedelta(seconds=1))
    with pytest.raises(RevisionGone, match="begin again with r0"):
        changes_since("region", start)
    rows.region("us-west-2")
    now = revision_now()
    assert changed(now) == set()


def test_a_revision_of_another_database_must_begin_again() -> None:
    with pytest.raises(RevisionGone):
        changes_since("region", "r900000000000-900000000000-")


@pytest.mark.parametrize("text", [BEGINNING, "r1-1-", "r10-20-", "r10-20-10.14", "r10-11-10"])
def test_what_reads_like_a_revision_can_be_asked_for(text: str) -> None:
    assert is_revision(text)
    if text != BEGINNING:
        changes_since("region", text)


def test_nobody_meets_a_revision_that_we_made_and_do_not_take() -> None:
    with another_session() as one, another_session() as two:
        write(one, "one")
        write(two, "two")
        assert is_revision(revision_now())


def test_one_look_names_the_kinds_that_changed_since_the_look_before() -> None:
    snapshot, kinds = kinds_changed(None)
    assert kinds == []
    with another_session() as slow:
        write(slow, "slow")
        rows.node("n-00000001", where="us-east-1")
        snapshot, kinds = kinds_changed(snapshot)
        assert {"node", "region"} <= set(kinds)
        slow.commit()
    snapshot, kinds = kinds_changed(snapshot)
    assert kinds == ["region"]
    assert kinds_changed(snapshot)[1] == []
