"""Triggers note what is written while a capture is on, however it was written, and nothing else."""

from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group, User
from django.db import connection, transaction

from accounts.services.token import token_create, token_used
from audit import row_capture
from audit.models import CapturedRow
from audit.row_capture import MAX_ROWS_LISTED, NOT_CAPTURED, Changes, RowCapture, session_capture
from fleet.regions.models import Region
from kernel.events import event_record
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def captured(write: Any) -> Changes:
    capture = RowCapture()
    capture.start()
    write()
    changes = capture.finish()
    assert not CapturedRow.objects.exists()
    return changes


def execute(sql: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


def test_every_table_of_a_model_has_the_trigger_or_is_bookkeeping() -> None:
    with connection.cursor() as cursor:
        cursor.execute(row_capture._TABLES_WITH_TRIGGER)
        installed = {row[0] for row in cursor.fetchall()}
    tables = {model._meta.db_table for model in apps.get_models(include_auto_created=True) if model._meta.managed}
    assert tables - installed == NOT_CAPTURED & tables
    assert tables >= NOT_CAPTURED
    row_capture.install_triggers()  # a second time it finds all of them


def test_nothing_is_noted_outside_a_capture() -> None:
    rows.region("r-1")
    captured(lambda: None)
    rows.region("r-2")
    assert not CapturedRow.objects.exists()


def test_an_update_tells_its_columns_before_and_after_and_a_delete_what_was() -> None:
    region = rows.region("r-1")

    def write() -> None:
        Region.objects.filter(pk=region.pk).update(provider="aws")
        Region.objects.filter(pk=region.pk).update(provider="aws")  # changes nothing
        region.delete()

    updated, deleted = captured(write).rows
    assert updated["changed"]["provider"] == ["local", "aws"]
    assert (updated["table"], updated["did"], updated["key"]) == ("fleet_region", "update", "r-1")
    assert (deleted["did"], deleted["was"]["provider"]) == ("delete", "aws")


def test_statements_that_nobody_could_read_are_noted_too() -> None:
    """Rows that a service writes in raw SQL: with a WITH, from a SELECT, by COPY."""
    user = User.objects.create_user("ada")

    def write() -> None:
        execute("WITH made AS (INSERT INTO auth_group (name) VALUES ('a') RETURNING id) SELECT * FROM made")
        execute("INSERT INTO auth_user_groups (user_id, group_id) SELECT %s, id FROM auth_group", user.pk)
        with connection.cursor() as cursor, cursor.copy("COPY auth_group (name) FROM STDIN") as copy:
            copy.write("b\n")

    assert [(row["table"], row["did"]) for row in captured(write).rows] == [
        ("auth_group", "insert"),
        ("auth_user_groups", "insert"),
        ("auth_group", "insert"),
    ]


def test_what_a_savepoint_takes_back_was_not_written() -> None:
    def write() -> None:
        with transaction.atomic():
            rows.region("r-1")
            event_record(kind="test.gone", message="gone", now=NOW, region="r-1")
            transaction.set_rollback(True)
        event_record(kind="test.stays", message="stays", now=NOW, node="n-1")

    changes = captured(write)
    assert changes.rows == []
    assert [event["kind"] for event in changes.events] == ["test.stays"]
    assert changes.objects == ["node/n-1"]


def test_of_many_rows_only_the_number_is_told() -> None:
    names = [f"g-{number}" for number in range(MAX_ROWS_LISTED + 1)]
    changes = captured(lambda: Group.objects.bulk_create(Group(name=name) for name in names))
    assert changes.rows == [{"table": "auth_group", "did": "insert", "rows": MAX_ROWS_LISTED + 1}]


def test_hashes_are_hidden_and_a_row_that_was_only_used_is_not_told() -> None:
    user = User.objects.create_user("ada")
    token, _ = token_create(user=user, name="t", now=NOW)

    def write() -> None:
        user.set_password("correct-horse")
        user.save()
        token_used(token=token, now=NOW)

    (row,) = captured(write).rows
    assert row["changed"] == {"password": "(hidden)"}


def test_a_command_is_captured_over_its_transactions() -> None:
    with session_capture() as changes:
        for name in ("r-1", "r-2"):
            with transaction.atomic():
                rows.region(name)
    assert [row["key"] for row in changes.rows if row["table"] == "fleet_region"] == ["r-1", "r-2"]
    rows.region("r-3")
    assert not CapturedRow.objects.exists()
