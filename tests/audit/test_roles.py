"""The application's role adds audit records and can change none, by no statement."""

from collections.abc import Iterator

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connection, transaction

from audit.models import AuditRecord, Proof
from audit.services import Act, Actor, audit_record, audit_verify
from kernel.events import event_record
from kernel.models import Event
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ROLE = "switchyard_test_application"


def execute(statement: str) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.fixture
def _as_application() -> Iterator[None]:
    """A role of this test's transaction."""
    execute(f"CREATE ROLE {ROLE}")
    call_command("grant_application", ROLE)
    execute(f"SET LOCAL ROLE {ROLE}")
    yield
    execute("RESET ROLE")


@pytest.mark.usefixtures("_as_application")
def test_it_does_the_work_of_the_application_and_adds_records() -> None:
    event_record(kind="node.lost", message="n-1 is lost", now=NOW)
    Event.objects.all().delete()
    for _ in range(2):
        audit_record(actor=Actor("ada", Proof.TOKEN), act=Act(action="a.b"), now=NOW)
    assert audit_verify().first_break is None


@pytest.mark.usefixtures("_as_application")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_auditrecord SET actor = 'eve'",
        "DELETE FROM audit_auditrecord",
        "TRUNCATE audit_auditrecord",
        "ALTER TABLE audit_auditrecord DISABLE TRIGGER USER",
        "DROP TRIGGER audit_record_stays ON audit_auditrecord",
        "CREATE OR REPLACE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'",
        "UPDATE audit_auditchain SET base_number = 99",
        "DELETE FROM audit_auditchain",
        "SET session_replication_role = replica",
        "DELETE FROM django_migrations",
        "CREATE TABLE more (id int)",
        "CREATE ROLE another SUPERUSER",
    ],
)
def test_it_changes_neither_records_nor_what_guards_them(statement: str) -> None:
    audit_record(actor=Actor("ada", Proof.TOKEN), act=Act(action="a.b"), now=NOW)
    execute("SET LOCAL switchyard.audit_retention = 'on'")
    with pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
        execute(statement)
    assert AuditRecord.objects.filter(actor="ada").exists()


def test_a_role_that_grants_do_not_restrict_is_refused() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user")
        owner = cursor.fetchone()[0]
    with pytest.raises(CommandError, match="grants do not restrict it"):
        call_command("grant_application", owner)
    with pytest.raises(CommandError, match="there is no role 'nobody-knows'"):
        call_command("grant_application", "nobody-knows")
