"""Concurrent writers: records form one chain, without deadlocks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from audit.models import AuditRecord, Proof
from audit.services import Act, Actor, audit_record, audit_verify
from fleet.regions.models import Region
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

WRITERS, EACH = 4, 5


def test_writers_that_lock_other_rows_in_any_order_all_get_through() -> None:
    regions = [rows.region(f"r-{number}").name for number in range(2)]
    begin = threading.Barrier(WRITERS)

    def write(writer: int) -> None:
        try:
            begin.wait(60)
            for _ in range(EACH):
                with transaction.atomic():
                    Region.objects.select_for_update().get(name=regions[writer % 2])
                    audit_record(actor=Actor(f"w-{writer}", Proof.TOKEN), act=Act(action="x"), now=NOW)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(write, writer) for writer in range(WRITERS)]:
            done.result(60)
    assert AuditRecord.objects.count() == WRITERS * EACH
    assert audit_verify().first_break is None


def test_what_is_rolled_back_leaves_neither_a_record_nor_a_gap() -> None:
    with transaction.atomic():
        audit_record(actor=Actor("a", Proof.TOKEN), act=Act(action="x"), now=NOW)
        transaction.set_rollback(True)
    audit_record(actor=Actor("a", Proof.TOKEN), act=Act(action="y"), now=NOW)
    assert list(AuditRecord.objects.values_list("number", "action")) == [(1, "y")]
