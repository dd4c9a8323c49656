"""Verifies the chain (every record follows the one before it, none is missing, the last is the one that the head names)
and trims it: only from the beginning, only what holds, only what was exported unless that is waived, and with a record
of it. The chain goes on from where the trimmed records ended."""

from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction
from django.db.models import Max

from audit.chain import ChainBreak, first_break
from audit.models import ONLY_CHAIN, AuditChain, AuditExport, AuditRecord
from audit.selectors import audit_chain
from kernel.refusals import Conflict

ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the chain at some time. Kept elsewhere, it proves later that nothing up to `number` was changed."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`checked` records hold. `first_break`: where the first does not."""

    checked: int
    head: Head
    first_break: ChainBreak | None


def parse_head(text: str) -> Head:
    """A head as `audit_verify` prints it.

    Raises:
        ValueError: it does not read NUMBER:DIGEST.
    """
    number, _, digest = text.strip().partition(":")
    if not number.isdecimal() or len(digest) != 64:
        raise ValueError(f"a head reads NUMBER:DIGEST, as audit_verify prints it; not {text[:80]!r}")
    return Head(int(number), digest)


def audit_verify(earlier: Head | None = None) -> Verdict:
    """Check all records that there are, in one snapshot; `earlier` is a head that was written down earlier."""
    with transaction.atomic():
        if not connection.savepoint_ids:  # else the snapshot is the caller's
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        chain = audit_chain()
        records = AuditRecord.objects.order_by("number").iterator(ROWS_AT_ONCE)
        broken, number, digest = first_break(records, after=chain.base_number, digest=chain.base_digest)
        head = Head(chain.head_number, chain.head_digest)
        if broken is None:
            broken = _break_at_head(head, number, digest) or _break_at_earlier_head(earlier, chain.base_number, head)
    return Verdict(number - chain.base_number, head, broken)


def _break_at_head(head: Head, number: int, digest: str) -> ChainBreak | None:
    if number < head.number:
        return ChainBreak(number + 1, f"it is missing, as is everything up to {head.number}, where the chain ends")
    if (number, digest) != (head.number, head.digest):
        return ChainBreak(number, f"the chain's own head is {head}, the last record's {number}:{digest}")
    return None


def _break_at_earlier_head(earlier: Head | None, base_number: int, head: Head) -> ChainBreak | None:
    if earlier is None or earlier.number <= base_number:
        return None
    if earlier.number > head.number:
        return ChainBreak(head.number + 1, f"it is missing: the head that was kept names record {earlier.number}")
    digest = AuditRecord.objects.filter(number=earlier.number).values_list("digest", flat=True).first()
    if earlier.number > 0 and digest != earlier.digest:
        return ChainBreak(earlier.number, f"its digest is {digest}, and was {earlier.digest} when the head was kept")
    return None


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
        broken, number, digest = first_break(records, after=chain.base_number, digest=chain.base_digest)
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
