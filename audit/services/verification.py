"""Walks the whole chain and says whether it holds: every record follows the one before it, none is missing, and the
last is the one that the head names. It changes nothing."""

from dataclasses import dataclass

from django.db import connection, transaction

from audit.chain import Broken, first_broken
from audit.models import AuditRecord
from audit.selectors import audit_chain

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
    """`checked` records hold. `broken`: the first that does not."""

    checked: int
    head: Head
    broken: Broken | None


def parse_head(text: str) -> Head:
    """A head as `audit_verify` prints it.

    Raises:
        ValueError: it does not read NUMBER:DIGEST.
    """
    number, _, digest = text.strip().partition(":")
    if not number.isdecimal() or len(digest) != 64:
        raise ValueError(f"a head reads NUMBER:DIGEST, as audit_verify prints it; not {text[:80]!r}")
    return Head(int(number), digest)


def audit_verify(kept: Head | None = None) -> Verdict:
    """Check all records that there are, in one snapshot; `kept` is a head that was written down earlier."""
    with transaction.atomic():
        if not connection.savepoint_ids:  # else the snapshot is the caller's
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        chain = audit_chain()
        records = AuditRecord.objects.order_by("number").iterator(ROWS_AT_ONCE)
        broken, number, digest = first_broken(records, after=chain.base_number, digest=chain.base_digest)
        head = Head(chain.head_number, chain.head_digest)
        if broken is None:
            broken = _against_head(head, number, digest) or _against_kept(kept, chain.base_number, head)
    return Verdict(number - chain.base_number, head, broken)


def _against_head(head: Head, number: int, digest: str) -> Broken | None:
    if number < head.number:
        return Broken(number + 1, f"it is missing, as is everything up to {head.number}, where the chain ends")
    if (number, digest) != (head.number, head.digest):
        return Broken(number, f"the chain's own head is {head}, the last record's {number}:{digest}")
    return None


def _against_kept(kept: Head | None, base_number: int, head: Head) -> Broken | None:
    if kept is None or kept.number <= base_number:
        return None
    if kept.number > head.number:
        return Broken(head.number + 1, f"it is missing: the head that was kept names record {kept.number}")
    found = AuditRecord.objects.filter(number=kept.number).values_list("digest", flat=True).first()
    if kept.number > 0 and found != kept.digest:
        return Broken(kept.number, f"its digest is {found}, and was {kept.digest} when the head was kept")
    return None
