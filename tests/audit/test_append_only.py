"""The database keeps records as they are; what is altered all the same is named."""

from collections.abc import Callable
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction

from audit.models import AuditChain, AuditRecord, Proof
from audit.services import Act, Actor, audit_record, audit_trim, audit_verify, parse_head
from kernel.refusals import Conflict
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ADA = Actor("ada", Proof.TOKEN, "10.0.0.1", "0a1b2c3d")


def write(count: int) -> None:
    for number in range(count):
        act = Act(
            action="node.cordon", object="node/n-1", reason=f"naïve {number} \x00", changes={"asked": {"n": 1.50}}
        )
        audit_record(actor=ADA, act=act, now=NOW + timedelta(days=number))


def behind_its_back(sql: str) -> None:
    """Runs a statement as the database's owner."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE audit_auditrecord DISABLE TRIGGER USER")
        cursor.execute(sql)
        cursor.execute("ALTER TABLE audit_auditrecord ENABLE TRIGGER USER")


@pytest.mark.parametrize(
    "change",
    [
        lambda: AuditRecord.objects.filter(number=2).update(actor="eve"),
        lambda: AuditRecord.objects.filter(number=2).delete(),
        lambda: AuditRecord.objects.all().delete(),
    ],
)
def test_records_are_neither_changed_nor_removed(change: Callable[[], object]) -> None:
    write(3)
    with pytest.raises(IntegrityError, match="never changed"), transaction.atomic():
        change()
    assert audit_verify().checked == 3


def test_what_was_altered_behind_its_back_is_named() -> None:
    write(4)
    behind_its_back("UPDATE audit_auditrecord SET reason = 'nothing happened' WHERE number = 3")
    with pytest.raises(CommandError, match="record 3 is broken"):
        call_command("audit_verify")


def test_a_cut_off_end_is_named() -> None:
    write(4)
    behind_its_back("DELETE FROM audit_auditrecord WHERE number >= 3")
    broken = audit_verify().first_break
    assert broken is not None
    assert broken.number == 3


def test_a_head_that_was_kept_tells_of_a_chain_that_was_written_anew() -> None:
    write(3)
    printed = StringIO()
    call_command("audit_verify", stdout=printed)
    kept = parse_head(printed.getvalue().rpartition(" ")[2])
    behind_its_back("DELETE FROM audit_auditrecord")
    AuditChain.objects.all().delete()
    write(5)
    assert audit_verify().first_break is None
    broken = audit_verify(kept).first_break
    assert broken is None, "the same acts at the same times make the same chain"
    behind_its_back("DELETE FROM audit_auditrecord")
    AuditChain.objects.all().delete()
    audit_record(actor=ADA, act=Act(action="other"), now=NOW)
    write(5)
    broken = audit_verify(kept).first_break
    assert broken is not None
    assert broken.number == 3


def test_old_records_go_only_knowingly_and_the_rest_still_holds() -> None:
    write(5)
    with pytest.raises(Conflict, match="never exported"):
        audit_trim(before=NOW + timedelta(days=2), unexported_too=False)
    assert audit_trim(before=NOW + timedelta(days=2), unexported_too=True) == 2
    verdict = audit_verify()
    assert (verdict.checked, verdict.first_break, verdict.head.number) == (3, None, 5)
    with pytest.raises(IntegrityError, match="never changed"), transaction.atomic():
        AuditRecord.objects.filter(number=3).delete()


def test_trimming_is_recorded_itself() -> None:
    write(2)
    call_command("audit_trim", before="2026-11-22", unexported_too=True, stdout=StringIO())
    assert AuditRecord.objects.latest("number").action == "command.audit_trim"
    assert audit_verify().first_break is None
