"""Lets old records go, knowingly: only from the beginning, only what holds, only what was exported unless it is said
that it need not be, and with a record of it. The chain goes on from where they ended."""

from datetime import datetime

from django.db import connection, transaction
from django.db.models import Max

from audit.chain import first_broken
from audit.models import ONLY_CHAIN, AuditChain, AuditExport, AuditRecord
from audit.services.verification import ROWS_AT_ONCE
from kernel.refusals import Conflict


def audit_trim(*, before: datetime, unexported_too: bool) -> int:
    """Remove the records older than `before`, and return how many.

    Raises:
        Conflict: one of them is broken; or was not exported.
    """
    with transaction.atomic():
        chain = AuditChain.objects.select_for_update().filter(pk=ONLY_CHAIN).first()
        first_kept = AuditRecord.objects.filter(at__gte=before).order_by("number").values_list("number", flat=True)
        if chain is None or not (old := _up_to(chain, first_kept.first())):
            return 0
        _check_exported(old, unexported_too)
        records = AuditRecord.objects.filter(number__lte=old).order_by("number").iterator(ROWS_AT_ONCE)
        broken, number, digest = first_broken(records, after=chain.base_number, digest=chain.base_digest)
        if broken is not None:
            raise Conflict(f"record {broken.number} is broken ({broken.why}); nothing is removed while it is")
        removed = number - chain.base_number
        chain.base_number, chain.base_digest = number, digest
        chain.save(update_fields=["base_number", "base_digest"])
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('switchyard.audit_retention', 'on', true)")
            cursor.execute("DELETE FROM audit_auditrecord WHERE number <= %s", [number])
            cursor.execute("SELECT set_config('switchyard.audit_retention', 'off', true)")
    return removed


def _up_to(chain: AuditChain, first_kept: int | None) -> int:
    """The last number that goes; 0: none does."""
    last = chain.head_number if first_kept is None else first_kept - 1
    return last if last > chain.base_number else 0


def _check_exported(number: int, unexported_too: bool) -> None:
    exported = AuditExport.objects.aggregate(far=Max("number"))["far"] or 0
    if exported < number and not unexported_too:
        message = f"records {exported + 1} to {number} were never exported; export them, or say --unexported-too"
        raise Conflict(message)
